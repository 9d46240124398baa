//! Chunks into work requests that gather or scatter: one remote run, several local pieces.

use super::chunks::{Chunk, Place, Split};
use super::segments::Segments;

/// Groups chunks whose remote sides follow each other without a gap into requests of several local pieces.
///
/// A request is at most as long as the split's chunks may be, and has at most `max_pieces` pieces (the device's limit on
/// scatter-gather entries). Its pieces are walked again by [`Request::pieces`], so that nothing is stored.
///
/// ```
/// use towline_core::split::{Gather, Limits, Segment, Split};
///
/// let remote = Segment { region: 0, offset: 0, len: 600 };
/// let local: Vec<_> = (0..6).map(|n| Segment { region: 0, offset: n * 1000, len: 100 }).collect();
/// let split = Split::new(&remote, &local[..], Limits::new(4096)?)?;
/// let requests: Vec<_> = Gather::new(split, 4).collect();
/// assert_eq!(requests.iter().map(|r| (r.len, r.pieces().count())).collect::<Vec<_>>(), [(400, 4), (200, 2)]);
/// # Ok::<(), towline_core::split::SplitError>(())
/// ```
#[derive(Debug)]
pub struct Gather<'a, R: ?Sized, L: ?Sized> {
    split: Split<'a, R, L>,
    max_pieces: usize,
}

/// One work request: a remote run, and where its bytes are or go to locally.
#[derive(Debug)]
pub struct Request<'a, R: ?Sized, L: ?Sized> {
    /// Where it begins in the remote list.
    pub remote: Place,
    /// Bytes in all.
    pub len: u64,
    /// The split where the request begins.
    split: Split<'a, R, L>,
    pieces: usize,
}

impl<'a, R: Segments + ?Sized, L: Segments + ?Sized> Gather<'a, R, L> {
    /// Requests of at most `max_pieces` pieces; 0 counts as 1.
    #[must_use]
    pub fn new(split: Split<'a, R, L>, max_pieces: usize) -> Self {
        Self { split, max_pieces: max_pieces.max(1) }
    }
}

impl<'a, R: Segments + ?Sized, L: Segments + ?Sized> Iterator for Gather<'a, R, L> {
    type Item = Request<'a, R, L>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = self.split.clone();
        let first = self.split.next()?;
        let mut request = Request { remote: first.remote, len: first.len, split: start, pieces: 1 };
        while request.pieces < self.max_pieces && self.split.remote_goes_on() {
            let before = self.split.clone();
            match self.split.next() {
                Some(chunk) if request.len + chunk.len <= self.split.longest() => {
                    request.len += chunk.len;
                    request.pieces += 1;
                }
                _ => {
                    self.split = before;
                    break;
                }
            }
        }
        Some(request)
    }
}

impl<R: Segments + ?Sized, L: Segments + ?Sized> Request<'_, R, L> {
    /// The pieces in order: together they are the request's remote run.
    pub fn pieces(&self) -> impl Iterator<Item = Chunk> + '_ {
        self.split.clone().take(self.pieces)
    }
}
