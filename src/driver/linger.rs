//! Whether the background thread waits a moment for the next caller before it takes the reactor.
//!
//! Who gets one payload after the other is back at once, and a reactor that the background thread took meanwhile has to be
//! handed back between threads, which costs more than the rest of a small get. But what comes from peers in that moment
//! waits for it, so it is not tried again for a while when nobody came.

use std::time::Duration;

/// How long the next caller is waited for.
pub(super) const LINGER: Duration = Duration::from_micros(250);
/// How often the reactor is taken at once after a wait in vain.
const IN_VAIN: u32 = 100;

/// What is known of callers: they are counted as they come.
#[derive(Debug, Default)]
pub(super) struct Linger {
    /// How many had come when it was looked at last.
    seen: u64,
    in_vain: u32,
}

impl Linger {
    /// Whether to wait for the next caller, now that the last of `come` has left.
    pub(super) fn is_worth_it(&mut self, come: u64) -> bool {
        if come == self.seen {
            return false; // nobody was here since
        }
        self.seen = come;
        let tries = self.in_vain == 0;
        self.in_vain = self.in_vain.saturating_sub(1);
        tries
    }

    /// A wait is over; whether it was worth it, and the next may be.
    pub(super) fn was_worth_it(&mut self, come: u64) -> bool {
        let somebody = come != self.seen;
        self.seen = come;
        if !somebody {
            self.in_vain = IN_VAIN;
        }
        somebody
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_caller_is_waited_for_while_they_come_and_not_for_a_while_when_nobody_did() {
        let mut linger = Linger::default();
        assert!(!linger.is_worth_it(0), "nobody has come yet");
        assert!(linger.is_worth_it(1));
        assert!(linger.was_worth_it(3) && linger.was_worth_it(4));
        assert!(!linger.was_worth_it(4));
        assert!(!linger.is_worth_it(4), "nobody has come since");
        for come in 5..105 {
            assert!(!linger.is_worth_it(come), "{come}");
        }
        assert!(linger.is_worth_it(105));
    }
}
