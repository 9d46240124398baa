//! The naive baseline: a tree as owned tensors, through a general serializer into bytes and back.
//!
//! What a program does that has no transport for tensors: MessagePack through serde, one allocation a tensor.

use super::content::{PartSeen, Readable, copy_of};
use super::layout::Layout;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// A tensor that owns its bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    data: ByteBuf,
}

/// A tree of tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tree(Vec<Tensor>);

impl Tree {
    /// The tensors of `layout`, zeroed.
    pub(crate) fn new(layout: &Layout) -> Self {
        let tensor = |part: &super::layout::PartPlan| Tensor {
            name: part.name.clone(),
            dtype: part.dtype.to_string(),
            shape: part.shape.clone(),
            data: ByteBuf::from(vec![0; part.len as usize]),
        };
        Self(layout.parts().iter().map(tensor).collect())
    }

    /// The bytes of tensor `part`.
    pub(crate) fn data_mut(&mut self, part: usize) -> &mut [u8] {
        &mut self.0[part].data
    }

    /// All of it as bytes.
    ///
    /// # Errors
    /// What the serializer says.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, String> {
        rmp_serde::to_vec_named(self).map_err(|e| format!("encoding the tree: {e}"))
    }

    /// The tree that `bytes` hold.
    ///
    /// # Errors
    /// What the serializer says.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        rmp_serde::from_slice(bytes).map_err(|e| format!("decoding the tree: {e}"))
    }
}

impl Readable for Tree {
    fn parts(&self) -> Vec<PartSeen> {
        let seen = |t: &Tensor| PartSeen {
            name: t.name.clone(),
            dtype: t.dtype.clone(),
            shape: t.shape.clone(),
            len: t.data.len() as u64,
        };
        self.0.iter().map(seen).collect()
    }

    fn read(&self, part: usize, offset: u64, out: &mut [u8]) -> bool {
        copy_of(&self.0[part].data, offset, out)
    }
}

/// Bytes that the encoding of `layout` takes at most.
pub(crate) fn encoded_bound(layout: &Layout) -> u64 {
    let header: u64 = layout.parts().iter().map(|p| 64 + p.name.len() as u64 + 9 * p.shape.len() as u64).sum();
    layout.size() + header + 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::args::Verify;
    use crate::command::bench::content::{Content, check};

    #[test]
    fn a_tree_comes_back_as_it_was() {
        for size in [1, 4096, 3_000_001] {
            let layout = Layout::tree(size);
            let mut tree = Tree::new(&layout);
            for (index, part) in layout.parts().iter().enumerate() {
                Content::new(1, 2).fill(part.offset, tree.data_mut(index));
            }
            let bytes = tree.encode().unwrap();
            assert!(bytes.len() as u64 >= size && bytes.len() as u64 <= encoded_bound(&layout), "{}", bytes.len());
            let back = Tree::decode(&bytes).unwrap();
            assert_eq!(back, tree);
            assert_eq!(check(&layout, 1, 2, Verify::Full, &back), Ok(()));
        }
    }

    #[test]
    fn bytes_that_hold_no_tree_are_refused() {
        assert!(Tree::decode(b"nothing").is_err());
        let bytes = Tree::new(&Layout::tree(4096)).encode().unwrap();
        assert!(Tree::decode(&bytes[..bytes.len() - 1]).is_err());
    }
}
