//! Which path takes the next chunk.

/// One path, with a weight and the work it was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rail {
    weight: u32,
    /// Bytes given, divided by the weight, in units of 2^-32 bytes: when the rail would be done with it.
    due: u128,
}

impl Rail {
    /// A rail of this weight: its speed, in any unit that all rails of a set share. Weight 0: the rail is down.
    #[must_use]
    pub const fn new(weight: u32) -> Self {
        Self { weight, due: 0 }
    }

    /// Its weight.
    #[must_use]
    pub const fn weight(self) -> u32 {
        self.weight
    }
}

/// Spreads chunks over rails so that each gets bytes in proportion to its weight, and is never further from that than
/// one chunk. The set of rails is the caller's memory.
///
/// ```
/// use towline_core::split::{Rail, Rails};
///
/// let mut set = [Rail::new(100), Rail::new(300)];
/// let mut rails = Rails::new(&mut set);
/// let picks: Vec<_> = (0..8).filter_map(|_| rails.pick(4096)).collect();
/// assert_eq!(picks.iter().filter(|&&rail| rail == 1).count(), 6);
/// ```
#[derive(Debug)]
pub struct Rails<'a> {
    rails: &'a mut [Rail],
}

impl<'a> Rails<'a> {
    /// Over these rails, as much as they were given before.
    #[must_use]
    pub fn new(rails: &'a mut [Rail]) -> Self {
        Self { rails }
    }

    /// The rail for the next `len` bytes: the one that would be done with them first; `None` if all are down.
    pub fn pick(&mut self, len: u64) -> Option<usize> {
        let up = self.rails.iter().enumerate().filter(|(_, rail)| rail.weight > 0);
        let (due, index) = up.map(|(index, rail)| (rail.due.saturating_add(cost(len, rail.weight)), index)).min()?;
        self.rails[index].due = due;
        Some(index)
    }

    /// Sets a rail's weight: as measured, 0 when it went down. A rail that comes up begins level with the least loaded
    /// of those that are up: it is not made to catch up on what it missed. No rail of this number: no effect.
    pub fn set_weight(&mut self, index: usize, weight: u32) {
        let least = self.rails.iter().filter(|rail| rail.weight > 0).map(|rail| rail.due).min().unwrap_or(0);
        if let Some(rail) = self.rails.get_mut(index) {
            if rail.weight == 0 {
                rail.due = rail.due.max(least);
            }
            rail.weight = weight;
        }
    }
}

fn cost(len: u64, weight: u32) -> u128 {
    (u128::from(len) << 32) / u128::from(weight)
}
