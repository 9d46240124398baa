//! What happened, as one number and, on request, as text.

use super::random::mix;

/// The fold of every event of a run.
#[derive(Debug, Default)]
pub(super) struct Trace {
    hash: u64,
    lines: Option<Vec<String>>,
}

impl Trace {
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    pub(super) fn record(&mut self, on: bool) {
        self.lines = on.then(Vec::new);
    }

    pub(super) fn take(&mut self) -> Vec<String> {
        self.lines.as_mut().map(core::mem::take).unwrap_or_default()
    }

    /// Folds one event in. The order of the calls matters, as it must.
    pub(super) fn event(&mut self, now: u64, what: &str, values: &[u64]) {
        self.fold(now);
        self.fold(digest(what.as_bytes()));
        for &value in values {
            self.fold(value);
        }
        if let Some(lines) = &mut self.lines {
            let mut line = format!("{now:>12} {what}");
            for value in values {
                line.push_str(&format!(" {value}"));
            }
            lines.push(line);
        }
    }

    fn fold(&mut self, value: u64) {
        self.hash = mix(self.hash.rotate_left(5) ^ value).wrapping_add(0x9E37_79B9_7F4A_7C15);
    }
}

/// A digest of bytes, so that a trace differs where content differs.
pub(super) fn digest(bytes: &[u8]) -> u64 {
    let mut hash = bytes.len() as u64 ^ 0x517C_C1B7_2722_0A95;
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = (hash.rotate_left(5) ^ u64::from_le_bytes(word)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
    mix(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash_of(events: &[(u64, &str, &[u64])]) -> u64 {
        let mut trace = Trace::default();
        for (now, what, values) in events {
            trace.event(*now, what, values);
        }
        trace.hash()
    }

    #[test]
    fn every_part_and_the_order_count() {
        let base = hash_of(&[(1, "a", &[2]), (3, "b", &[4])]);
        assert_eq!(base, hash_of(&[(1, "a", &[2]), (3, "b", &[4])]));
        for other in [
            hash_of(&[(3, "b", &[4]), (1, "a", &[2])]),
            hash_of(&[(2, "a", &[2]), (3, "b", &[4])]),
            hash_of(&[(1, "c", &[2]), (3, "b", &[4])]),
            hash_of(&[(1, "a", &[2]), (3, "b", &[5])]),
            hash_of(&[(1, "a", &[2])]),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn lines_are_kept_only_on_request() {
        let mut trace = Trace::default();
        trace.event(1, "quiet", &[]);
        assert!(trace.take().is_empty());
        trace.record(true);
        trace.event(2, "loud", &[7]);
        assert_eq!(trace.take(), ["           2 loud 7"]);
    }

    #[test]
    fn digests_see_every_byte_and_the_length() {
        assert_ne!(digest(b"12345678"), digest(b"12345679"));
        assert_ne!(digest(b"1234567"), digest(b"1234567\0"));
        assert_ne!(digest(b""), digest(b"\0"));
    }
}
