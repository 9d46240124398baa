//! Contents that follow from a seed, so that whoever gets them can tell every wrong byte.

use towline::{DType, Endpoint, Part, PartRef, Payload, PutOptions, Result, Ticket, View};

/// A stream of words from `seed` (splitmix64).
pub fn words(seed: u64) -> impl Iterator<Item = u64> {
    (1u64..).map(move |index| {
        let mut z = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// Fills `bytes` with the content of `seed`.
pub fn fill(seed: u64, bytes: &mut [u8]) {
    for (chunk, word) in bytes.chunks_mut(8).zip(words(seed)) {
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
}

/// A hash of `bytes` in which their order and number count.
pub fn hash(bytes: &[u8]) -> u64 {
    let mut hash = 0x243f_6a88_85a3_08d3 ^ bytes.len() as u64;
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x9fb2_1c65_1e98_df25);
        hash ^= hash >> 29;
    }
    hash
}

/// How a payload's bytes come into the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Written in place into pool buffers.
    InPlace,
    /// Copied in by `put`.
    Copied,
}

/// One part to be put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartSpec {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<u64>,
    pub seed: u64,
}

/// A part of this description.
pub fn part(name: &str, dtype: DType, shape: &[u64], seed: u64) -> PartSpec {
    PartSpec { name: name.to_owned(), dtype, shape: shape.to_vec(), seed }
}

impl PartSpec {
    pub fn len(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.size()
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len() as usize];
        fill(self.seed, &mut bytes);
        bytes
    }
}

/// A payload to be put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    pub parts: Vec<PartSpec>,
    pub how: How,
}

const DTYPES: [DType; 17] = [
    DType::U8,
    DType::I8,
    DType::Bool,
    DType::U16,
    DType::I16,
    DType::F16,
    DType::BF16,
    DType::U32,
    DType::I32,
    DType::F32,
    DType::U64,
    DType::I64,
    DType::F64,
    DType::F8E4M3,
    DType::F8E5M2,
    DType::Complex64,
    DType::Complex128,
];

impl Spec {
    pub const DTYPES: [DType; 17] = DTYPES;

    /// `len` bytes, written in place.
    pub fn bytes(len: u64, seed: u64) -> Self {
        Self::of([part("bytes", DType::U8, &[len], seed)])
    }

    /// These parts, written in place.
    pub fn of(parts: impl Into<Vec<PartSpec>>) -> Self {
        Self { parts: parts.into(), how: How::InPlace }
    }

    pub fn copied(mut self) -> Self {
        self.how = How::Copied;
        self
    }

    /// 64 parts of unequal size, each with the name of a leaf in a tree, a dtype and a shape of its own; two without
    /// bytes.
    pub fn tree(seed: u64) -> Self {
        let leaf = |index: u64| {
            let dtype = DTYPES[index as usize % DTYPES.len()];
            let rows = 1 + index * index % 97;
            let shape = match index % 5 {
                0 => vec![rows],
                1 => vec![rows, 3],
                2 => vec![2, rows, 5],
                3 => vec![rows * 40],
                _ => vec![1, rows, 1, 7],
            };
            let shape = if index == 17 || index == 40 { vec![0, rows] } else { shape };
            let name =
                format!("layers.{}.{}", index / 8, ["k", "v", "q", "o", "w1", "w2", "w3", "norm"][index as usize % 8]);
            PartSpec { name, dtype, shape, seed: seed.wrapping_add(index) }
        };
        Self::of((0..64).map(leaf).collect::<Vec<_>>())
    }

    pub fn len(&self) -> u64 {
        self.parts.iter().map(PartSpec::len).sum()
    }

    /// Publishes it.
    pub fn put(&self, endpoint: &Endpoint, key: impl AsRef<[u8]>, options: &PutOptions) -> Result<Ticket> {
        match self.how {
            How::InPlace => {
                let mut parts = Vec::new();
                for part in &self.parts {
                    parts.push(if part.len() == 0 {
                        Part::bytes(&part.name, part.dtype, &part.shape, &[])
                    } else {
                        let mut buffer = endpoint.alloc(part.len() as usize)?;
                        fill(part.seed, &mut buffer);
                        Part::buffer(&part.name, part.dtype, &part.shape, buffer)
                    });
                }
                endpoint.put_with(key, parts, options)
            }
            How::Copied => {
                let bytes: Vec<Vec<u8>> = self.parts.iter().map(PartSpec::bytes).collect();
                let parts = self
                    .parts
                    .iter()
                    .zip(&bytes)
                    .map(|(part, bytes)| Part::bytes(&part.name, part.dtype, &part.shape, bytes));
                endpoint.put_with(key, parts, options)
            }
        }
    }

    /// Every name, type, shape and byte is as put.
    #[track_caller]
    pub fn check(&self, payload: &Payload) {
        self.check_got(&Got::of(payload));
        assert_eq!(payload.len(), self.parts.len());
        for (part, got) in self.parts.iter().zip(payload.parts()) {
            let same = bytes_of(part, got);
            assert!(same, "part `{}`: wrong bytes", part.name);
        }
    }

    /// The same of what another process says it has got.
    #[track_caller]
    pub fn check_got(&self, got: &Got) {
        assert_eq!(got.parts.len(), self.parts.len(), "{got:?}");
        assert_eq!(got.bytes, self.len());
        for (part, (name, dtype, shape, hashed)) in self.parts.iter().zip(&got.parts) {
            assert_eq!((name, dtype, shape), (&part.name, &part.dtype.name().to_owned(), &part.shape));
            assert_eq!(*hashed, hash(&part.bytes()), "part `{name}`: wrong bytes");
        }
    }

    /// Its form in a command to another process.
    pub fn to_text(&self) -> String {
        let mut text = String::from(if self.how == How::InPlace { "in-place" } else { "copied" });
        for PartSpec { name, dtype, shape, seed } in &self.parts {
            let shape: Vec<String> = shape.iter().map(ToString::to_string).collect();
            text.push_str(&format!(";{name},{dtype},{},{seed}", shape.join("x")));
        }
        text
    }

    pub fn from_text(text: &str) -> Self {
        let mut words = text.split(';');
        let how = if words.next() == Some("in-place") { How::InPlace } else { How::Copied };
        let parts = words.map(|word| {
            let mut fields = word.split(',');
            let mut field = || fields.next().unwrap();
            let (name, dtype, shape, seed) = (field(), field(), field(), field());
            PartSpec {
                name: name.to_owned(),
                dtype: *DTYPES.iter().find(|known| known.name() == dtype).unwrap(),
                shape: shape.split('x').filter(|extent| !extent.is_empty()).map(|e| e.parse().unwrap()).collect(),
                seed: seed.parse().unwrap(),
            }
        });
        Self { parts: parts.collect(), how }
    }
}

/// Compares word by word with what the seed gives, without another copy of the content.
fn bytes_of(part: &PartSpec, got: PartRef<'_>) -> bool {
    got.bytes().len() as u64 == part.len()
        && got.bytes().chunks(8).zip(words(part.seed)).all(|(chunk, word)| chunk == &word.to_le_bytes()[..chunk.len()])
}

/// What was got, as it can be told to another process: the parts with a hash of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Got {
    pub path: String,
    pub reason: String,
    pub retries: u32,
    pub bytes: u64,
    pub fallback_bytes: u64,
    pub parts: Vec<(String, String, Vec<u64>, u64)>,
}

impl Got {
    pub fn of(payload: &Payload) -> Self {
        let info = payload.info();
        let parts = payload.parts().map(|part| {
            let layout = part.layout();
            (layout.name.clone(), layout.dtype.name().to_owned(), layout.shape.clone(), hash(part.bytes()))
        });
        Self {
            path: info.path.name().to_owned(),
            reason: info.path_reason.clone(),
            retries: info.retries,
            bytes: info.bytes,
            fallback_bytes: info.fallback_bytes,
            parts: parts.collect(),
        }
    }

    pub fn of_view(view: &View) -> Self {
        let info = view.info();
        let parts = view.parts().map(|part| {
            let layout = part.layout();
            (layout.name.clone(), layout.dtype.name().to_owned(), layout.shape.clone(), hash(&part.to_vec()))
        });
        Self {
            path: info.path.name().to_owned(),
            reason: info.path_reason.clone(),
            retries: info.retries,
            bytes: info.bytes,
            fallback_bytes: info.fallback_bytes,
            parts: parts.collect(),
        }
    }

    pub fn to_text(&self) -> String {
        let mut text =
            format!("{}\t{}\t{}\t{}\t{}", self.path, self.reason, self.retries, self.bytes, self.fallback_bytes);
        for (name, dtype, shape, hash) in &self.parts {
            let shape: Vec<String> = shape.iter().map(ToString::to_string).collect();
            text.push_str(&format!("\t{name},{dtype},{},{hash}", shape.join("x")));
        }
        text
    }

    pub fn from_text(text: &str) -> Self {
        let mut fields = text.split('\t');
        let mut field = || fields.next().unwrap();
        let (path, reason, retries, bytes, fallback) = (field(), field(), field(), field(), field());
        let parts = fields.map(|text| {
            let mut fields = text.split(',');
            let mut field = || fields.next().unwrap();
            let (name, dtype, shape, hash) = (field(), field(), field(), field());
            let shape = shape.split('x').filter(|extent| !extent.is_empty()).map(|e| e.parse().unwrap()).collect();
            (name.to_owned(), dtype.to_owned(), shape, hash.parse().unwrap())
        });
        Self {
            path: path.to_owned(),
            reason: reason.to_owned(),
            retries: retries.parse().unwrap(),
            bytes: bytes.parse().unwrap(),
            fallback_bytes: fallback.parse().unwrap(),
            parts: parts.collect(),
        }
    }
}
