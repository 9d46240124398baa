//! A peer that does not keep to the protocol: raw sockets with the token, and bytes of their own.

use crate::harness::*;
use std::io::{Read, Write};
use std::net::TcpStream;
use towline_verbs::{Cause, Error, Opcode, QueuePairState};

/// A raw peer of a passive end, through the handshake on its one stream.
struct Raw {
    stream: TcpStream,
    end: End,
    _endpoint: Endpoint,
}

/// A header as on the wire.
#[derive(Default, Clone, Copy)]
struct Header {
    op: u8,
    id: u32,
    seq: u32,
    imm: u32,
    address: u64,
    len: u64,
    rkey: u64,
}

const READ: u8 = 1;
const DATA: u8 = 2;
const WRITE: u8 = 3;
const IMMEDIATE: u8 = 4;
const SEND: u8 = 5;
const ACK: u8 = 7;

impl Header {
    fn bytes(self) -> Vec<u8> {
        let mut out = vec![0xA7, self.op, 0, 0];
        for word in [self.id, self.seq, self.imm] {
            out.extend(word.to_le_bytes());
        }
        for long in [self.address, self.len, self.rkey] {
            out.extend(long.to_le_bytes());
        }
        out
    }
}

fn hello(index: u8, streams: u8) -> Vec<u8> {
    let mut bytes = b"twl-tcp\x01".to_vec();
    bytes.extend([index, streams, 0, 0, 0, 0, 0, 0]);
    bytes
}

impl Raw {
    fn new() -> Self {
        let mut raw = Self::unheard();
        raw.say(&hello(0, 1));
        drive(&[&raw.end.device], || raw.end.qp.state() == QueuePairState::ReadyToSend);
        let mut answer = [0; 16];
        raw.stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[10], 1);
        raw
    }

    /// Before its hello.
    fn unheard() -> Self {
        let endpoint = Endpoint::with("127.0.0.1", |config| config.streams = 1);
        let (end, other) = (endpoint.end(), endpoint.end());
        let token = end.qp.address()[8..24].try_into().unwrap();
        end.qp.connect(&other.qp.address(), false).unwrap();
        let mut stream = TcpStream::connect(endpoint.address).unwrap();
        stream.write_all(&preface(towline_verbs::Token(token))).unwrap();
        Self { stream, end, _endpoint: endpoint }
    }

    fn say(&mut self, bytes: &[u8]) {
        // The other end may have closed already.
        let _gone = self.stream.write_all(bytes);
    }

    /// Drives the end until it fails.
    fn failure(&self) -> Error {
        drive(&[&self.end.device], || self.end.qp.is_fenced());
        assert_eq!(self.end.qp.state(), QueuePairState::Error);
        self.end.qp.failure().unwrap()
    }

    fn is_malformed(&self) {
        let failure = self.failure();
        assert!(matches!(failure.cause, Cause::Malformed { .. }), "{failure}");
    }
}

#[test]
fn hellos_that_are_none() {
    for bytes in [b"GET / HTTP/1.1\r\n\r\n".to_vec(), hello(1, 1), hello(0, 2), hello(0, 0), vec![0; 16]] {
        let mut raw = Raw::unheard();
        raw.say(&bytes);
        raw.is_malformed();
    }
}

#[test]
fn headers_that_are_none() {
    let good = Header { op: READ, ..Header::default() }.bytes();
    for (at, with) in [(0, 0), (1, 0), (1, 9), (2, 1), (2, 200), (3, 1), (12, 1)] {
        let mut bytes = good.clone();
        bytes[at] = with;
        let mut raw = Raw::new();
        raw.say(&bytes);
        raw.is_malformed();
    }
}

#[test]
fn a_header_that_comes_byte_by_byte_is_one() {
    let mut raw = Raw::new();
    let region = raw.end.memory(4096);
    fill(&region, 1);
    let remote = region.remote(100, 50).unwrap();
    let request = Header { op: READ, id: 77, address: 100, len: 50, rkey: remote.rkey, ..Header::default() };
    for byte in request.bytes() {
        raw.say(&[byte]);
        let _more = raw.end.device.progress();
    }
    raw.stream.set_nonblocking(true).unwrap();
    let mut answer: Vec<u8> = Vec::new();
    drive(&[&raw.end.device], || {
        let mut room = [0; 256];
        if let Ok(len) = raw.stream.read(&mut room) {
            answer.extend(&room[..len]);
        }
        answer.len() >= 40 + 50 + 8
    });
    assert_eq!(answer[40..90], bytes(&region, 100, 50));
    assert_eq!(answer[90..], [0xE7, 0, 0, 0, 77, 0, 0, 0]);
}

#[test]
fn answers_that_nobody_asked_for() {
    let data = Header { op: DATA, len: 10, ..Header::default() };
    for header in [data, Header { op: ACK, ..Header::default() }, Header { op: ACK, seq: 5, ..Header::default() }] {
        let mut raw = Raw::new();
        raw.say(&header.bytes());
        raw.is_malformed();
    }
}

#[test]
fn data_beyond_what_was_asked_for() {
    let wrong = [(0, 101), (1, 100), (100, 1), (u64::MAX - 5, 1), (50, 0)];
    for (address, len) in wrong {
        let mut raw = Raw::new();
        let to = raw.end.memory(4096);
        to.memory().write(0, &[0xEE; 4096]).unwrap();
        let remote = towline_verbs::RemoteSlice { address: 0, len: 100, rkey: 1 };
        raw.end.post(1, Opcode::Read, vec![slice(&to, 0, 100)], Some(remote));
        raw.say(&Header { op: DATA, address, len, ..Header::default() }.bytes());
        raw.say(&[0; 200]);
        raw.is_malformed();
        assert_eq!(bytes(&to, 0, 4096), [0xEE; 4096]);
        assert_eq!(raw.end.poll().len(), 1);
    }
    // The same bytes twice.
    let mut raw = Raw::new();
    let to = raw.end.memory(4096);
    let remote = towline_verbs::RemoteSlice { address: 0, len: 100, rkey: 1 };
    raw.end.post(1, Opcode::Read, vec![slice(&to, 0, 100)], Some(remote));
    for _ in 0..2 {
        raw.say(&Header { op: DATA, address: 0, len: 60, ..Header::default() }.bytes());
        raw.say(&[0; 60]);
        raw.say(&[0xE7, 0, 0, 0, 0, 0, 0, 0]);
    }
    raw.is_malformed();
}

#[test]
fn a_trailer_of_another_read() {
    let mut raw = Raw::new();
    let to = raw.end.memory(4096);
    let remote = towline_verbs::RemoteSlice { address: 0, len: 4, rkey: 1 };
    raw.end.post(1, Opcode::Read, vec![slice(&to, 0, 4)], Some(remote));
    raw.say(&Header { op: DATA, len: 4, ..Header::default() }.bytes());
    raw.say(&[1, 2, 3, 4, 0xE7, 0, 0, 0, 1, 0, 0, 0]);
    raw.is_malformed();
}

#[test]
fn sequence_numbers_twice_or_outside_the_window() {
    let write = |raw: &Raw, seq| {
        let rkey = raw.end.memory(4096).remote(0, 0).unwrap().rkey;
        Header { op: WRITE, seq, rkey, ..Header::default() }
    };
    for seqs in [vec![0, 0], vec![128], vec![5, 5], vec![u32::MAX]] {
        let mut raw = Raw::new();
        let region = raw.end.memory(4096);
        for seq in seqs {
            let rkey = region.remote(0, 0).unwrap().rkey;
            raw.say(&Header { rkey, ..write(&raw, seq) }.bytes());
        }
        raw.is_malformed();
    }
    let mut raw = Raw::new();
    raw.say(&Header { op: IMMEDIATE, seq: 128, ..Header::default() }.bytes());
    raw.is_malformed();
    let mut raw = Raw::new();
    raw.say(&Header { op: READ, seq: 129, ..Header::default() }.bytes());
    raw.is_malformed();
}

#[test]
fn more_reads_than_the_protocol_allows() {
    let mut raw = Raw::new();
    let region = raw.end.memory(64 << 20);
    let rkey = region.remote(0, 0).unwrap().rkey;
    let request = Header { op: READ, len: 64 << 20, rkey, ..Header::default() };
    // Answers are not read, so the queue can only grow.
    raw.say(&(0..100).flat_map(|id| Header { id, ..request }.bytes()).collect::<Vec<_>>());
    raw.is_malformed();
}

#[test]
fn acknowledgements_that_nobody_reads_do_not_pile_up() {
    let mut raw = Raw::new();
    let region = raw.end.memory(4096);
    let rkey = region.remote(0, 0).unwrap().rkey;
    raw.stream.set_nonblocking(true).unwrap();
    let (mut seq, mut rest) = (0u32, Vec::new());
    drive(&[&raw.end.device], || {
        // As many writes as go in, without reading a single answer.
        while rest.len() < 1 << 16 {
            rest.extend(Header { op: WRITE, seq, rkey, ..Header::default() }.bytes());
            seq += 1;
        }
        if let Ok(taken) = raw.stream.write(&rest) {
            rest.drain(..taken);
        }
        raw.end.qp.is_fenced()
    });
    raw.is_malformed();
}

#[test]
fn messages_longer_than_any() {
    for op in [READ, WRITE, SEND] {
        let mut raw = Raw::new();
        raw.say(&Header { op, len: (1 << 40) + 1, ..Header::default() }.bytes());
        raw.is_malformed();
    }
}

#[test]
fn one_guess_at_a_key_and_no_other() {
    let mut raw = Raw::new();
    let region = raw.end.memory(4096);
    let remote = region.remote(0, 16).unwrap();
    region.memory().write(0, &[0x55; 16]).unwrap();
    let right = Header { op: READ, len: 16, rkey: remote.rkey, ..Header::default() };
    raw.say(&Header { rkey: remote.rkey ^ 1 << 30, ..right }.bytes());
    for id in 1..10 {
        raw.say(&Header { id, ..right }.bytes());
    }
    raw.say(
        &[&Header { op: WRITE, len: 16, rkey: remote.rkey, ..Header::default() }.bytes()[..], &[0x66; 16]].concat(),
    );
    raw.stream.set_nonblocking(true).unwrap();
    let mut answer: Vec<u8> = Vec::new();
    let mut rests = 0;
    drive(&[&raw.end.device], || {
        let mut room = [0; 256];
        if let Ok(len) = raw.stream.read(&mut room) {
            answer.extend(&room[..len]);
        }
        rests = if wait(&[&raw.end.device], std::time::Duration::from_millis(5)) { 0 } else { rests + 1 };
        rests == 10
    });
    assert_eq!(answer.len(), 40, "one refusal and no data: {answer:x?}");
    assert_eq!(answer[1..3], [8, 1]);
    assert_eq!(bytes(&region, 0, 16), [0x55; 16]);
}

#[test]
fn random_bytes_after_the_handshake_never_do_harm() {
    let mut word = 0x1234_5678_9ABC_DEF1u64;
    let mut next = || {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        word
    };
    for _ in 0..60 {
        let mut raw = Raw::new();
        let region = raw.end.memory(4096);
        let rkey = region.remote(0, 1).unwrap().rkey;
        raw.end.receive(1, Some(slice(&region, 0, 100)));
        for _ in 0..200 {
            // Headers that are nearly right.
            let header = Header {
                op: (next() % 9) as u8,
                id: (next() % 3) as u32,
                seq: (next() % 3) as u32,
                imm: 0,
                address: next() % 5000,
                len: next() % 64,
                rkey: if next() % 4 == 0 { next() } else { rkey },
            };
            let mut bytes = header.bytes();
            bytes.extend(std::iter::repeat_n(0xA7, (next() % 80) as usize));
            raw.say(&bytes);
        }
        drop(raw.stream);
        drive(&[&raw.end.device], || raw.end.qp.is_fenced());
        assert!(raw.end.poll().len() == 1);
    }
}
