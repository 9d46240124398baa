//! The byte queues of a session.

/// Bytes received and not yet read. What lies behind them is kept initialised, so that a socket reads straight into it
/// and nothing is cleared twice.
#[derive(Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

const FIRST_LEN: usize = 4096;

impl Inbox {
    pub(super) fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Takes `len` bytes off the front and says where they lie; they stay valid until [`space`](Self::space).
    pub(super) fn take(&mut self, len: usize) -> &[u8] {
        let start = self.start;
        self.start += len;
        &self.bytes[start..self.start]
    }

    /// Free space at the end: at least `at_least` bytes, or as many as the bound of `bound` unread and free bytes
    /// leaves. Growth is by doubling as bytes arrive, never by what a peer announces (I7).
    pub(super) fn space(&mut self, at_least: usize, bound: usize) -> &mut [u8] {
        let unread = self.end - self.start;
        let at_least = at_least.min(bound.saturating_sub(unread));
        if unread == 0 || self.bytes.len() - self.end < at_least {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, unread);
        }
        if self.bytes.len() - self.end < at_least {
            let len = (2 * self.bytes.len()).clamp(FIRST_LEN.min(bound), bound).max(self.end + at_least);
            self.bytes.resize(len, 0);
        }
        &mut self.bytes[self.end..]
    }

    /// `len` bytes of the space have been written.
    ///
    /// # Panics
    /// If there was less space: the caller's mistake, not the peer's.
    pub(super) fn filled(&mut self, len: usize) {
        assert!(len <= self.bytes.len() - self.end, "more bytes filled than there was space");
        self.end += len;
    }
}

/// Bytes to be sent.
#[derive(Default)]
pub(super) struct Outbox {
    bytes: Vec<u8>,
    start: usize,
}

impl Outbox {
    pub(super) fn unsent(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// # Panics
    /// If fewer bytes are unsent: the caller's mistake, not the peer's.
    pub(super) fn consume(&mut self, len: usize) {
        assert!(len <= self.bytes.len() - self.start, "more bytes consumed than there were");
        self.start += len;
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        }
    }

    /// Where to append. Sent bytes in front are dropped once they are the larger part, so each byte moves at most once
    /// for each byte sent.
    pub(super) fn tail(&mut self) -> &mut Vec<u8> {
        if self.start > self.bytes.len() / 2 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        &mut self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inbox_keeps_order_and_its_bound() {
        let mut inbox = Inbox::default();
        let (mut written, mut read) = (0_u8, 0_u8);
        for round in 0..2000_usize {
            let wanted = round % 97;
            let space = inbox.space(wanted, 200);
            let len = wanted.min(space.len());
            space[..len].fill_with(|| {
                written = written.wrapping_add(1);
                written
            });
            inbox.filled(len);
            assert!(inbox.unread().len() <= 200 && inbox.bytes.len() <= 200);
            for &byte in inbox.take(inbox.unread().len() * (round % 3) / 3) {
                read = read.wrapping_add(1);
                assert_eq!(byte, read);
            }
        }
        assert_eq!(inbox.unread().len(), usize::from(written.wrapping_sub(read)));
    }

    #[test]
    fn a_full_inbox_has_no_space() {
        let mut inbox = Inbox::default();
        let len = inbox.space(1, 64).len();
        inbox.filled(len);
        assert_eq!(len, 64);
        assert!(inbox.space(1, 64).is_empty());
        inbox.take(10);
        assert_eq!(inbox.space(1000, 64).len(), 10);
    }

    #[test]
    fn an_outbox_keeps_order_and_drops_what_is_sent() {
        let mut outbox = Outbox::default();
        let (mut written, mut sent) = (0_usize, 0_usize);
        for round in 0..3000_usize {
            outbox.tail().extend((written..written + 300).map(|at| at as u8));
            written += 300;
            assert!(outbox.bytes.len() <= 2 * outbox.unsent().len(), "sent bytes pile up");
            let len = outbox.unsent().len().min(round % 640);
            assert!(outbox.unsent()[..len].iter().enumerate().all(|(at, &byte)| byte == (sent + at) as u8));
            outbox.consume(len);
            sent += len;
            assert_eq!(outbox.unsent().len(), written - sent);
        }
    }
}
