//! Percentiles, by the nearest rank: always a value that was measured.

/// Measured values, sorted.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Sorted(Vec<f64>);

impl Sorted {
    /// Sorts `values`.
    pub(crate) fn new(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    /// The smallest value that at least `share` (0 to 1) of all values don't exceed; `None` of nothing.
    pub(crate) fn percentile(&self, share: f64) -> Option<f64> {
        let rank = (self.0.len() as f64 * share).ceil() as usize;
        self.0.get(rank.max(1) - 1).copied()
    }

    /// The value in the middle (the lower one of two).
    pub(crate) fn median(&self) -> Option<f64> {
        self.percentile(0.5)
    }

    /// The largest value.
    pub(crate) fn max(&self) -> Option<f64> {
        self.0.last().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let hundred = Sorted::new((1..=100).rev().map(f64::from));
        assert_eq!(hundred.percentile(0.5), Some(50.0));
        assert_eq!(hundred.percentile(0.9), Some(90.0));
        assert_eq!(hundred.percentile(0.99), Some(99.0));
        assert_eq!(hundred.percentile(1.0), Some(100.0));
        assert_eq!(hundred.percentile(0.0), Some(1.0));
        assert_eq!(hundred.max(), Some(100.0));
    }

    #[test]
    fn few_values_and_none() {
        assert_eq!(Sorted::new([]).median(), None);
        assert_eq!(Sorted::new([]).max(), None);
        assert_eq!(Sorted::new([3.0]).percentile(0.99), Some(3.0));
        assert_eq!(Sorted::new([4.0, 2.0]).median(), Some(2.0));
        assert_eq!(Sorted::new([9.0, 1.0, 5.0]).median(), Some(5.0));
        assert_eq!(Sorted::new([9.0, 1.0, 5.0]).percentile(0.9), Some(9.0));
    }
}
