//! How a payload of a given size is divided into parts.

#[cfg(test)]
use super::content::PartSeen;
use super::content::mix;
use towline::DType;

/// Parts of a tree.
pub(crate) const TREE_PARTS: usize = 64;

/// The parts of a payload, in order, one behind the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    parts: Vec<PartPlan>,
    size: u64,
}

/// One part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PartPlan {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    /// Where the part begins in the payload, in bytes.
    pub(crate) offset: u64,
    /// Its length in bytes: shape times the size of the dtype.
    pub(crate) len: u64,
}

#[cfg(test)]
impl PartPlan {
    /// The part as a consumer must be told of it.
    pub(crate) fn seen(&self) -> PartSeen {
        PartSeen { name: self.name.clone(), dtype: self.dtype.to_string(), shape: self.shape.clone(), len: self.len }
    }
}

impl Layout {
    /// One part of bytes.
    pub(crate) fn single(size: u64) -> Self {
        let part = PartPlan { name: "payload".into(), dtype: DType::U8, shape: vec![size], offset: 0, len: size };
        Self { parts: vec![part], size }
    }

    /// Parts of unequal size, as a model's cache has them: keys and values of 31 layers in several dtypes, one table
    /// of positions, and the odd bytes left over at the end. Small payloads have parts of length zero.
    pub(crate) fn tree(size: u64) -> Self {
        let weights: Vec<u64> = (0..TREE_PARTS as u64 - 1).map(|i| 1 + mix(i) % 15).collect();
        let total: u64 = weights.iter().sum::<u64>() + 4;
        let mut parts = Vec::with_capacity(TREE_PARTS);
        let mut offset = 0;
        for (index, weight) in weights.into_iter().enumerate() {
            // A multiple of 64 bytes: eight elements of the widest dtype, whatever the dtype.
            let len = (u128::from(size) * u128::from(weight) / u128::from(total) / 64 * 64) as u64;
            let dtype = [DType::BF16, DType::F16, DType::F32, DType::I64, DType::U8][index % 5];
            let width = dtype.size();
            let (name, shape) = match index {
                62 => ("positions".to_string(), vec![len / width]),
                _ => {
                    let which = if index % 2 == 0 { "key" } else { "value" };
                    let elements = len / width;
                    let shape = if index % 3 == 0 { vec![2, elements / 8, 4] } else { vec![elements / 8, 8] };
                    (format!("layers.{}.{which}", index / 2), shape)
                }
            };
            parts.push(PartPlan { name, dtype, shape, offset, len });
            offset += len;
        }
        let len = size - offset;
        parts.push(PartPlan { name: "rest".into(), dtype: DType::U8, shape: vec![len], offset, len });
        Self { parts, size }
    }

    /// The parts, in order.
    pub(crate) fn parts(&self) -> &[PartPlan] {
        &self.parts
    }

    /// Bytes of all parts.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The part that holds byte `at` of the payload.
    pub(crate) fn part_at(&self, at: u64) -> Option<(usize, &PartPlan)> {
        self.parts.iter().enumerate().find(|(_, part)| part.offset <= at && at - part.offset < part.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn parts_follow_each_other_and_fill_the_payload() {
        for size in [1, 63, 4096, 1 << 20, 190 << 20, (1 << 30) + 13] {
            for layout in [Layout::single(size), Layout::tree(size)] {
                let mut end = 0;
                for part in layout.parts() {
                    assert_eq!(part.offset, end);
                    assert_eq!(part.shape.iter().product::<u64>() * part.dtype.size(), part.len, "{part:?}");
                    end += part.len;
                }
                assert_eq!(end, size);
            }
        }
    }

    #[test]
    fn a_tree_has_64_parts_of_unequal_size_with_names_of_their_own() {
        let tree = Layout::tree(190 << 20);
        assert_eq!(tree.parts().len(), TREE_PARTS);
        let names: HashSet<_> = tree.parts().iter().map(|p| &p.name).collect();
        assert_eq!(names.len(), TREE_PARTS);
        let (small, large) = tree.parts().iter().fold((u64::MAX, 0), |(s, l), p| (s.min(p.len), l.max(p.len)));
        assert!(large > 8 * small && small > 0, "{small} to {large}");
        let dtypes: HashSet<_> = tree.parts().iter().map(|p| p.dtype).collect();
        assert_eq!(dtypes.len(), 5);
    }

    #[test]
    fn a_byte_is_found_in_its_part() {
        let tree = Layout::tree(100_000);
        for at in [0, 1, 999, 50_000, 99_999] {
            let (index, part) = tree.part_at(at).unwrap();
            assert_eq!(&tree.parts()[index], part);
            assert!((part.offset..part.offset + part.len).contains(&at));
        }
        assert_eq!(tree.part_at(100_000), None);
    }
}
