//! Requests in the send queue: what each holds until it is done, and which of them ask for a completion.
//!
//! Requests of a queue pair complete in the order posted, so one completion tells of all before it. A request asks for one
//! when it is the last of those that are posted together, and within these every [`INTERVAL`] requests or
//! [`INTERVAL_BYTES`]: what is large is known to be done soon, what is small costs the device one entry for many. Places in
//! the send queue, and in the completion queue, are held until the caller has polled the completion that is made here for
//! each request: neither can overflow, also when all that is posted flushes, each with an entry of its own.

use crate::WorkRequest;
use std::collections::VecDeque;
use std::vec::IntoIter;

/// Requests of which one at least asks for a completion.
const INTERVAL: u32 = 16;
/// Bytes of requests of which one at least asks for a completion.
const INTERVAL_BYTES: u64 = 64 << 10;
/// Numbers of requests come round after so many, many more than a send queue holds.
const NUMBERS: u32 = super::SLOT as u32 + 1;

/// What is posted and not known to be done, oldest first. Requests keep their memory registered.
#[derive(Debug, Default)]
pub(super) struct Sends {
    /// As they were posted together.
    batches: VecDeque<IntoIter<WorkRequest>>,
    len: usize,
    /// The number of the oldest.
    first: u32,
}

/// Requests that are done, oldest first.
#[derive(Debug)]
pub(super) struct Done<'a> {
    sends: &'a mut Sends,
    left: usize,
}

impl Iterator for Done<'_> {
    type Item = WorkRequest;

    fn next(&mut self) -> Option<WorkRequest> {
        self.left = self.left.checked_sub(1)?;
        self.sends.pop()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Done<'_> {}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}

/// Which of the requests that are posted together ask for a completion.
#[derive(Debug)]
pub(super) struct Asking {
    left: usize,
    /// Since the last that asked.
    silent: u32,
    silent_bytes: u64,
}

impl Asking {
    /// For so many requests.
    pub(super) fn new(count: usize) -> Self {
        Self { left: count, silent: 0, silent_bytes: 0 }
    }

    /// Whether the next one asks.
    #[inline]
    pub(super) fn next(&mut self, bytes: u64) -> bool {
        self.left = self.left.saturating_sub(1);
        self.silent += 1;
        self.silent_bytes = self.silent_bytes.saturating_add(bytes);
        let asks = self.left == 0 || self.silent >= INTERVAL || self.silent_bytes >= INTERVAL_BYTES;
        if asks {
            (self.silent, self.silent_bytes) = (0, 0);
        }
        asks
    }
}

/// The number of the request that is `i` after the one of number `first`.
#[inline]
pub(super) fn number_after(first: u32, i: u32) -> u32 {
    first.wrapping_add(i) % NUMBERS
}

impl Sends {
    /// The number of the request that is added next.
    pub(super) fn next_number(&self) -> u32 {
        number_after(self.first, self.len as u32)
    }

    /// Adds requests that are to be posted.
    pub(super) fn add(&mut self, requests: Vec<WorkRequest>) {
        self.len += requests.len();
        self.batches.push_back(requests.into_iter());
    }

    fn pop(&mut self) -> Option<WorkRequest> {
        let batch = self.batches.front_mut()?;
        let request = batch.next();
        if batch.len() == 0 {
            self.batches.pop_front();
        }
        self.len -= usize::from(request.is_some());
        request
    }

    /// Takes back what was added last, and not posted.
    pub(super) fn withdraw(&mut self) -> Vec<WorkRequest> {
        let batch = self.batches.pop_back().unwrap_or_default();
        self.len -= batch.len();
        batch.collect()
    }

    /// The device has completed the request of this number: it, and those before it, are done. `None` if there is no such
    /// request.
    pub(super) fn done(&mut self, number: u32) -> Option<Done<'_>> {
        let before = number.wrapping_sub(self.first) % NUMBERS;
        if before as usize >= self.len {
            return None;
        }
        self.first = (number + 1) % NUMBERS;
        Some(Done { sends: self, left: before as usize + 1 })
    }

    /// All of them, in the order posted.
    pub(super) fn take_all(&mut self) -> Vec<WorkRequest> {
        self.first = self.next_number();
        self.len = 0;
        core::mem::take(&mut self.batches).into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Opcode;
    use proptest::prelude::*;

    fn send(id: u64) -> WorkRequest {
        WorkRequest { id, opcode: Opcode::Read, local: vec![], remote: None }
    }

    #[test]
    fn numbers_come_round() {
        let mut sends = Sends { first: NUMBERS - 2, ..Sends::default() };
        let numbers: Vec<_> = (0..4)
            .map(|id| {
                let number = sends.next_number();
                sends.add(vec![send(id)]);
                number
            })
            .collect();
        assert_eq!(numbers, [NUMBERS - 2, NUMBERS - 1, 0, 1]);
        assert!(sends.done(2).is_none() && sends.done(NUMBERS - 3).is_none());
        assert_eq!(sends.done(0).unwrap().map(|send| send.id).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(sends.done(0).is_none(), "a device that says it twice");
        assert_eq!(sends.done(1).unwrap().count(), 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        /// Against a device that completes what asks for it, and all once it flushes.
        #[test]
        fn every_request_is_done_once_and_in_order(
            batches in proptest::collection::vec((1usize..60, 0u64..20_000, 0usize..4), 1..30),
        ) {
            let mut sends = Sends::default();
            let (mut id, mut device, mut ended) = (0, VecDeque::new(), 0);
            for (count, bytes, polls) in batches {
                let (mut silent, mut asking, first) = ((0, 0), Asking::new(count), sends.next_number());
                sends.add((id..).take(count).map(send).collect());
                for i in 0..count {
                    let number = number_after(first, i as u32);
                    let asks = asking.next(bytes);
                    silent = if asks { (0, 0) } else { (silent.0 + 1, silent.1 + bytes) };
                    prop_assert!(silent.0 < INTERVAL && silent.1 < INTERVAL_BYTES);
                    device.push_back((number, asks));
                }
                id += count as u64;
                prop_assert!(device.back().unwrap().1, "nothing stays open");
                for _ in 0..polls {
                    let Some(at) = device.iter().position(|entry| entry.1) else { break };
                    let number = device.drain(..=at).next_back().unwrap().0;
                    for send in sends.done(number).unwrap() {
                        prop_assert_eq!(send.id, ended);
                        ended += 1;
                    }
                }
                prop_assert_eq!(sends.len, device.len());
            }
            // The queue pair goes to the error state: each request has an entry of its own.
            for (number, _) in device {
                for send in sends.done(number).unwrap() {
                    prop_assert_eq!(send.id, ended);
                    ended += 1;
                }
            }
            prop_assert_eq!((ended, sends.len), (id, 0));
        }
    }
}
