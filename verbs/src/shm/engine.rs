//! The copying: jobs cut into pieces, taken by whatever threads are there.
//!
//! A job is a list of pieces and a cursor. Any thread in [`Engine::run`] takes the next piece by one atomic addition and
//! copies it without holding a lock; whoever finishes the last one ends the job. Beside the threads of the callers there
//! are helper threads, one less than the number on which copying is fastest here, started when the first large job
//! comes and parked when there is nothing to do.
#![allow(unsafe_code)]

use super::domain::Region;
use super::lock;
use super::poller::Poller;
use super::queue_pair::Qp;
use super::segment::Segment;
use crate::{LocalSlice, copy};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of one piece of a large job. Between 256 KiB and 1 MiB no difference could be measured; smaller ones are slower
/// by some percent, larger ones keep `to_error` waiting and leave a thread idle at the end.
pub(super) const PIECE: usize = 512 << 10;
/// Jobs up to this length are one piece, and whoever posts them may copy them himself.
pub(super) const SMALL: usize = 64 << 10;
/// From this length on a job wakes a helper: it takes much longer to copy than the helper to wake.
const WORTH_HELP: usize = 1 << 20;
/// Bytes of one piece of a mapping that is made present; takes as long as copying a piece or two.
const POPULATE_PIECE: usize = 16 << 20;

/// A stretch of memory to copy.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stretch {
    pub(super) to: *mut u8,
    pub(super) from: *const u8,
    pub(super) len: usize,
}

/// What a job holds until it is over, so that the addresses of its stretches stay valid (I1).
#[derive(Debug, Default)]
#[allow(dead_code)] // most of it is held, not read
pub(super) struct Keep {
    pub(super) segment: Option<Arc<Segment>>,
    pub(super) local: Vec<LocalSlice>,
    pub(super) region: Option<Arc<Region>>,
}

/// Who is told that a job is over.
#[derive(Debug)]
pub(super) enum Purpose {
    /// A read of ours, by its number in the send queue.
    Read { queue_pair: Arc<Qp>, number: u64 },
    /// A piece of a peer's write or send.
    Serve { queue_pair: Arc<Qp> },
    /// Nobody: pages of a new mapping are made present.
    Populate,
}

#[derive(Debug)]
pub(super) struct Job {
    purpose: Purpose,
    pieces: Pieces,
    count: usize,
    bytes: usize,
    /// The next piece to take; more than `count` when all are taken.
    cursor: AtomicUsize,
    /// Pieces that are copied or skipped.
    finished: AtomicUsize,
    skipped: AtomicBool,
    keep: Keep,
}

#[derive(Debug)]
enum Pieces {
    Copy(Vec<Stretch>),
    Populate,
}

// SAFETY: the pointers of its stretches are used in `Job::execute` only, under the promise that `Job::copy` was given,
// which names no thread; the rest is `Send` and `Sync` by itself.
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

impl Job {
    /// A job that copies `stretches`, in pieces.
    ///
    /// # Safety
    /// Until the job is over, each stretch is valid for reads at `from` and for writes at `to`, they don't overlap, and
    /// nobody else uses `to`. (`keep` is what makes that so.)
    pub(super) unsafe fn copy(purpose: Purpose, stretches: Vec<Stretch>, keep: Keep) -> Arc<Self> {
        let bytes = stretches.iter().map(|stretch| stretch.len).sum();
        let pieces = if bytes <= SMALL { stretches } else { cut(&stretches) };
        Self::new(purpose, pieces.len(), bytes, Pieces::Copy(pieces), keep)
    }

    /// A job that makes the pages of a new mapping present.
    pub(super) fn populate(segment: Arc<Segment>) -> Arc<Self> {
        let bytes = segment.len();
        let keep = Keep { segment: Some(segment), ..Keep::default() };
        Self::new(Purpose::Populate, bytes.div_ceil(POPULATE_PIECE), bytes, Pieces::Populate, keep)
    }

    fn new(purpose: Purpose, count: usize, bytes: usize, pieces: Pieces, keep: Keep) -> Arc<Self> {
        let cursor = AtomicUsize::new(0);
        let finished = AtomicUsize::new(0);
        Arc::new(Self { purpose, pieces, count, bytes, cursor, finished, skipped: AtomicBool::new(false), keep })
    }

    pub(super) fn is_small(&self) -> bool {
        self.bytes <= SMALL
    }

    /// Bytes to copy in all.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    fn is_exhausted(&self) -> bool {
        self.cursor.load(Ordering::Relaxed) >= self.count
    }

    /// Takes a piece. The caller executes it and then calls [`retire`](Self::retire).
    fn claim(&self) -> Option<usize> {
        if self.is_exhausted() {
            return None; // also keeps the cursor from growing without end
        }
        let piece = self.cursor.fetch_add(1, Ordering::Relaxed);
        (piece < self.count).then_some(piece)
    }

    fn execute(&self, piece: usize) {
        match &self.pieces {
            Pieces::Copy(stretches) if self.bytes < copy::LARGE => {
                let Stretch { to, from, len } = stretches[piece];
                // SAFETY: the promise given to `Job::copy`; `cursor` gave this piece to this thread alone.
                unsafe { copy::copy(to, from, len) }
            }
            Pieces::Copy(stretches) => {
                let Stretch { to, from, len } = stretches[piece];
                // SAFETY: as above.
                unsafe { copy::best().routine.copy(to, from, len) }
            }
            Pieces::Populate => {
                if let Some(segment) = &self.keep.segment {
                    let offset = piece * POPULATE_PIECE;
                    segment.populate(offset, POPULATE_PIECE.min(segment.len() - offset));
                }
            }
        }
    }

    /// Counts `pieces` as finished; whoever counts the last one ends the job. The release makes what this thread copied
    /// visible to the one that ends it.
    fn retire(&self, pieces: usize) -> Option<Over> {
        let before = self.finished.fetch_add(pieces, Ordering::AcqRel);
        (before + pieces == self.count).then(|| Over { skipped: self.skipped.load(Ordering::Acquire) })
    }

    /// Takes all pieces that nobody has begun, so that no further byte is copied once those at work are through. If
    /// none is at work the job is over with this call.
    pub(super) fn abort(&self) -> Option<Over> {
        let taken = self.cursor.swap(self.count, Ordering::AcqRel).min(self.count);
        let rest = self.count - taken;
        if rest == 0 {
            return None;
        }
        self.skipped.store(true, Ordering::Release);
        self.retire(rest)
    }

    /// Copies all of a job that nobody else has, on this thread.
    pub(super) fn run_alone(&self) {
        while let Some(piece) = self.claim() {
            self.execute(piece);
            if let Some(over) = self.retire(1) {
                self.end(over);
            }
        }
    }

    /// Tells who waits for it. The queue pair that has more to do now, if any, is returned.
    fn end(&self, over: Over) -> Option<&Arc<Qp>> {
        match &self.purpose {
            Purpose::Read { queue_pair, number } => {
                queue_pair.read_is_over(*number, over);
                None
            }
            Purpose::Serve { queue_pair } => {
                queue_pair.served_is_over(over);
                Some(queue_pair)
            }
            Purpose::Populate => None,
        }
    }
}

/// The end of a job.
#[derive(Debug, Clone, Copy)]
pub(super) struct Over {
    /// Whether pieces were left out, because the queue pair failed.
    pub(super) skipped: bool,
}

/// Cuts stretches into pieces of at most [`PIECE`].
fn cut(stretches: &[Stretch]) -> Vec<Stretch> {
    let mut pieces = Vec::with_capacity(stretches.iter().map(|stretch| stretch.len.div_ceil(PIECE)).sum());
    for &Stretch { to, from, len } in stretches {
        for offset in (0..len).step_by(PIECE) {
            let (to, from) = (to.wrapping_add(offset), from.wrapping_add(offset));
            pieces.push(Stretch { to, from, len: PIECE.min(len - offset) });
        }
    }
    pieces
}

/// The jobs of a device and the threads that help.
#[derive(Debug)]
pub(super) struct Engine {
    poller: Arc<Poller>,
    jobs: Mutex<Jobs>,
    /// Helpers wait here.
    work: Condvar,
    /// Jobs in `jobs`, so that nobody locks in vain.
    queued: AtomicUsize,
    /// Threads in [`run`](Self::run) or helping.
    copiers: AtomicUsize,
    /// Most of them: on more than these copying gets no faster.
    most: usize,
    helpers: usize,
}

#[derive(Debug, Default)]
struct Jobs {
    copies: VecDeque<Arc<Job>>,
    /// Mappings to make present, when nothing is to be copied.
    populates: VecDeque<Arc<Job>>,
    /// Helper threads that run.
    started: usize,
    closed: bool,
}

impl Jobs {
    /// The oldest job with a piece left. Those before it go to `spent`, to be dropped without the lock: what they keep
    /// may be the last handle of a memory.
    fn oldest(&mut self, spent: &mut Vec<Arc<Job>>) -> Option<Arc<Job>> {
        for queue in [&mut self.copies, &mut self.populates] {
            while let Some(job) = queue.front() {
                if !job.is_exhausted() {
                    return Some(job.clone());
                }
                spent.extend(queue.pop_front());
            }
        }
        None
    }

    fn len(&self) -> usize {
        self.copies.len() + self.populates.len()
    }
}

impl Engine {
    /// An engine on which at most `threads` threads copy at once, of which `threads - 1` are helpers.
    pub(super) fn new(poller: Arc<Poller>, threads: usize) -> Arc<Self> {
        let most = threads.max(1);
        Arc::new(Self {
            poller,
            jobs: Mutex::default(),
            work: Condvar::new(),
            queued: AtomicUsize::new(0),
            copiers: AtomicUsize::new(0),
            most,
            helpers: most - 1,
        })
    }

    /// Queues jobs, and sees to it that somebody takes them up.
    pub(super) fn submit(self: &Arc<Self>, new: impl IntoIterator<Item = Arc<Job>>) {
        let mut bytes = 0;
        {
            let mut jobs = lock(&self.jobs);
            for job in new {
                match job.purpose {
                    Purpose::Populate => jobs.populates.push_back(job),
                    _ => {
                        bytes += job.bytes;
                        jobs.copies.push_back(job);
                    }
                }
            }
            self.queued.store(jobs.len(), Ordering::SeqCst);
            if bytes >= WORTH_HELP {
                self.start_helpers(&mut jobs);
            }
        }
        if bytes >= WORTH_HELP && self.helpers > 0 {
            self.work.notify_all();
        }
        self.poller.raise();
    }

    /// Takes pieces for about `budget`. Returns whether there are more that this thread could take.
    pub(super) fn run(self: &Arc<Self>, budget: Duration) -> bool {
        if self.queued.load(Ordering::SeqCst) == 0 || !self.enter() {
            return false;
        }
        let more = self.take_pieces(Some(Instant::now() + budget));
        if self.leave() && more {
            // Nobody is left at it: a helper or whoever waits for the device should look.
            self.work.notify_one();
            self.poller.raise();
        }
        more
    }

    /// Forgets jobs that are over, as after `abort`.
    pub(super) fn tidy(&self) {
        let mut over = Vec::new();
        let mut jobs = lock(&self.jobs);
        jobs.copies.retain(|job| {
            let exhausted = job.is_exhausted();
            if exhausted {
                over.push(job.clone());
            }
            !exhausted
        });
        self.queued.store(jobs.len(), Ordering::SeqCst);
        drop(jobs); // before `over`, whose drop may unmap memory
    }

    /// Lets the helpers end.
    pub(super) fn close(&self) {
        lock(&self.jobs).closed = true;
        self.work.notify_all();
    }

    /// Takes pieces until there are none; a caller's thread also leaves when `until` has come, or when a job has no
    /// piece left and it has done something worth the call: its caller may have more to post, which keeps the helpers
    /// from running dry. Returns whether there are more.
    fn take_pieces(self: &Arc<Self>, until: Option<Instant>) -> bool {
        let mut copied = 0;
        loop {
            let Some(job) = self.oldest() else { return false };
            let mut late = false;
            while let Some(piece) = job.claim() {
                job.execute(piece);
                if let Some(queue_pair) = job.retire(1).and_then(|over| job.end(over)) {
                    queue_pair.service();
                }
                copied += PIECE.min(job.bytes);
                late = until.is_some_and(|until| Instant::now() >= until);
                if late {
                    break;
                }
            }
            drop(job);
            if late || (until.is_some() && copied >= WORTH_HELP) {
                return self.oldest().is_some();
            }
        }
    }

    /// The oldest job with a piece left.
    fn oldest(&self) -> Option<Arc<Job>> {
        let mut spent = Vec::new();
        let mut jobs = lock(&self.jobs);
        let job = jobs.oldest(&mut spent);
        self.queued.store(jobs.len(), Ordering::SeqCst);
        drop(jobs); // before `spent`
        job
    }

    fn enter(&self) -> bool {
        let more = |copiers| (copiers < self.most).then_some(copiers + 1);
        self.copiers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
    }

    /// Returns whether this was the last.
    fn leave(&self) -> bool {
        self.copiers.fetch_sub(1, Ordering::SeqCst) == 1
    }

    fn start_helpers(self: &Arc<Self>, jobs: &mut Jobs) {
        while jobs.started < self.helpers {
            let engine = self.clone();
            let thread = thread::Builder::new().name("towline-copy".into()).spawn(move || engine.help());
            if thread.is_err() {
                break; // no helper now; the callers' threads do all of it
            }
            jobs.started += 1;
        }
    }

    /// A helper thread's life.
    fn help(self: Arc<Self>) {
        let mut spent = Vec::new();
        let mut jobs = lock(&self.jobs);
        loop {
            if jobs.closed {
                return;
            }
            if jobs.oldest(&mut spent).is_some() && self.enter() {
                drop(jobs);
                self.take_pieces(None);
                self.leave();
                jobs = lock(&self.jobs);
            } else {
                if !spent.is_empty() {
                    drop(jobs);
                    spent.clear();
                    jobs = lock(&self.jobs);
                    continue; // something may have come meanwhile
                }
                jobs = self.work.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    /// A job whose stretches are single bytes, each of its own.
    fn job(from: &[u8], to: &mut [u8]) -> Arc<Job> {
        let to = to.as_mut_ptr();
        let stretch = |(at, byte): (usize, &u8)| Stretch { to: to.wrapping_add(at), from: byte, len: 1 };
        let stretches = from.iter().enumerate().map(stretch).collect();
        // SAFETY: both slices outlive the job in the tests below, which look at `to` only when it is over.
        unsafe { Job::copy(Purpose::Populate, stretches, Keep::default()) }
    }

    #[test]
    fn stretches_are_cut_without_gap_or_overlap() {
        let bytes = [0u8; 8];
        let base = bytes.as_ptr();
        let stretch = |offset: usize, len| Stretch {
            to: base.wrapping_add(offset).cast_mut(),
            from: base.wrapping_add(3 * offset),
            len,
        };
        let whole = [stretch(0, 2 * PIECE), stretch(9 * PIECE, 1), stretch(20 * PIECE, 3 * PIECE + 5)];
        let pieces = cut(&whole);
        assert_eq!(pieces.iter().map(|piece| piece.len).collect::<Vec<_>>(), [PIECE, PIECE, 1, PIECE, PIECE, PIECE, 5]);
        let mut pieces = pieces.iter();
        for stretch in whole {
            let mut done = 0;
            while done < stretch.len {
                let piece = pieces.next().unwrap();
                assert_eq!(piece.to, stretch.to.wrapping_add(done));
                assert_eq!(piece.from, stretch.from.wrapping_add(done));
                done += piece.len;
            }
            assert_eq!(done, stretch.len);
        }
    }

    /// I2, I3: whatever threads take pieces while another aborts, the job is over once, after the last piece.
    #[test]
    fn a_job_is_over_once_whoever_aborts() {
        const PIECES: usize = 64;
        let from = [1u8; PIECES];
        let (mut stopped, mut whole) = (0, 0);
        for round in 0..3000 {
            let mut to = [0u8; PIECES];
            let job = job(&from, &mut to);
            let copied = AtomicUsize::new(0);
            let ends = AtomicUsize::new(0);
            let barrier = Barrier::new(3);
            let ended = |over: Option<Over>| {
                if let Some(over) = over {
                    ends.fetch_add(1, Ordering::SeqCst);
                    // The end is seen with all that was copied.
                    assert_eq!(over.skipped, copied.load(Ordering::SeqCst) < PIECES);
                }
            };
            let work = || {
                barrier.wait();
                while let Some(piece) = job.claim() {
                    job.execute(piece);
                    copied.fetch_add(1, Ordering::SeqCst);
                    ended(job.retire(1));
                }
            };
            thread::scope(|scope| {
                scope.spawn(work);
                scope.spawn(work);
                barrier.wait();
                for _ in 0..round % 500 {
                    core::hint::spin_loop();
                }
                ended(job.abort());
                ended(job.abort());
            });
            assert_eq!(ends.load(Ordering::SeqCst), 1);
            assert!(job.claim().is_none());
            let copied = copied.load(Ordering::SeqCst);
            assert_eq!(to.iter().filter(|&&byte| byte == 1).count(), copied);
            if copied < PIECES { stopped += 1 } else { whole += 1 }
        }
        println!("{stopped} jobs were stopped, {whole} ran to their end");
        assert!(stopped > 0);
    }
}
