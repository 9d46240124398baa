//! What the tests of this crate share: frames of every kind, and two sessions with a wire between them.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // each test file uses its part

use proptest::prelude::*;
use towline_control::address::{Address, Host};
use towline_control::preface::Preface;
use towline_control::session::{Event, Identity, Limits, Session, SessionConfig, SessionError};
use towline_control::wire::*;

/// Parts from which a frame of every kind is made.
#[derive(Debug, Clone)]
pub struct Parts {
    pub wide: [u64; 6],
    pub narrow: [u32; 3],
    pub byte: u8,
    pub code: u16,
    pub id: [u8; 16],
    pub flag: bool,
    pub bytes: Vec<u8>,
    pub text: String,
    pub segments: Vec<Segment>,
    pub entries: Vec<CloseEntry>,
    pub leases: Vec<LeaseId>,
    pub addresses: AddressList,
}

pub fn address() -> impl Strategy<Value = Address> {
    prop_oneof![
        any::<(u32, u16)>().prop_map(|(ip, port)| std::net::SocketAddr::from((ip.to_be_bytes(), port)).into()),
        any::<([u8; 16], u16, u32)>().prop_map(|(ip, port, scope)| {
            std::net::SocketAddr::from(std::net::SocketAddrV6::new(ip.into(), port, 0, scope)).into()
        }),
        ("[a-z][a-z0-9.-]{0,254}", any::<u16>())
            .prop_map(|(name, port)| Address::Host(Host::new(&name, port).unwrap())),
    ]
}

pub fn parts() -> impl Strategy<Value = Parts> {
    let numbers = any::<([u64; 6], [u32; 3], u8, u16, [u8; 16], bool)>();
    let text = "\\PC{0,100}";
    let bytes = prop::collection::vec(any::<u8>(), 0..=107);
    let segments = prop::collection::vec(any::<(u64, u64, u64)>().prop_map(|(a, l, k)| Segment::new(a, l, k)), 0..12);
    let entries = prop::collection::vec(any::<(u64, u8)>().prop_map(|(l, o)| CloseEntry::new(l, o.into())), 0..20);
    let leases = prop::collection::vec(any::<u64>().prop_map(LeaseId::new), 0..20);
    let addresses = prop::collection::vec(address(), 0..=MAX_ADVERTISED)
        .prop_map(|addresses| AddressList::from_addresses(&addresses).unwrap());
    (numbers, bytes, text, segments, entries, leases, addresses).prop_map(
        |((wide, narrow, byte, code, id, flag), bytes, text, segments, entries, leases, addresses)| Parts {
            wide,
            narrow,
            byte,
            code,
            id,
            flag,
            bytes,
            text,
            segments,
            entries,
            leases,
            addresses,
        },
    )
}

/// Fixed parts, for tests that walk over every bit.
pub fn fixed_parts() -> Parts {
    let addresses = ["192.0.2.1:7000", "[fe80::1%3]:7001", "node-1.example:7002", "[fe80::2%eth0]:7003"];
    let addresses: Vec<Address> = addresses.map(|text| text.parse().unwrap()).into();
    Parts {
        wide: [1, 2, 0x0123_4567_89ab_cdef, u64::MAX, 5, 6],
        narrow: [7, 8, u32::MAX],
        byte: 9,
        code: 3,
        id: *b"0123456789abcdef",
        flag: true,
        bytes: b"layer/0 and more".to_vec(),
        text: "na\u{ef}ve \"reason\"".into(),
        segments: (0..3).map(|i| Segment::new(0x7000_0000 + i, 4096 * i, !i)).collect(),
        entries: vec![CloseEntry::new(1, Outcome::Delivered), CloseEntry::new(u64::MAX, Outcome::Unknown(200))],
        leases: vec![LeaseId::new(1), LeaseId::new(u64::MAX)],
        addresses: AddressList::from_addresses(&addresses).unwrap(),
    }
}

impl Parts {
    /// A frame of every kind.
    pub fn frames(&self) -> Vec<Frame<'_>> {
        let Self { wide: [a, b, c, d, e, f], narrow: [x, y, z], byte, code, id, flag, .. } = *self;
        let (bytes, text) = (&self.bytes[..], &self.text[..]);
        let versions = Versions { min: code / 2, max: code };
        let queue_pair = QueuePair { connection: x, provider: byte, generation: y, address: bytes };
        let get = Get {
            request: a,
            target: Target::Key(bytes),
            wait_us: b,
            sent_at: c,
            max_eager: z,
            flags: if flag { GetFlags::VIEW } else { GetFlags::empty() },
            provider: byte,
        };
        vec![
            Frame::Hello(Hello {
                versions,
                incarnation: id,
                boot_id: id.map(|byte| !byte),
                process: id.map(|byte| byte ^ 0x5a),
                unix_name: bytes,
                advertised: self.addresses.as_addresses(),
                max_frame: x.max(MIN_MAX_FRAME),
                features: a,
            }),
            Frame::Reject(Reject { code: code.into(), versions, text }),
            Frame::Handshake(bytes),
            Frame::QueuePairOpen(queue_pair),
            Frame::QueuePairAccept(queue_pair),
            Frame::QueuePairRefuse(QueuePairRefuse {
                connection: x,
                provider: byte,
                generation: y,
                code: code.into(),
                text,
            }),
            Frame::Get(get),
            Frame::Get(Get { target: Target::Slot { slot: x, generation: y }, ..get }),
            Frame::Grant(Grant {
                request: a,
                lease: b,
                slot: x,
                generation: y,
                echo: c,
                lease_us: d,
                watermark: e,
                total_len: f,
                provider: byte,
                flags: if flag { GrantFlags::VIEW } else { GrantFlags::empty() },
                layout: text.as_bytes(),
                segments: &self.segments,
                eager: bytes,
            }),
            Frame::Refuse(Refuse { request: a, code: code.into(), need: b, have: c, text }),
            Frame::Cancel(Cancel { request: a }),
            Frame::Close(Close { entries: &self.entries }),
            Frame::Watermark(Watermark { lease: a, watermark: b }),
            Frame::KeepAlive(KeepAlive { sent_at: a, leases: &self.leases }),
            Frame::KeepAliveAck(KeepAliveAck { echo: a, lease_us: b, unknown: &self.leases }),
            Frame::Goodbye(Goodbye { code: code.into() }),
        ]
    }

    /// The frames that a caller may send, the goodbye last.
    pub fn sendable(&self) -> Vec<Frame<'_>> {
        let mut frames = self.frames();
        frames.retain(|frame| !matches!(frame.kind(), Kind::Hello | Kind::Reject | Kind::Handshake));
        frames
    }
}

pub fn encoded(frame: &Frame<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes).unwrap();
    bytes
}

pub fn identity(name: u8) -> Identity {
    Identity {
        incarnation: [name; 16],
        boot_id: *b"the same machine",
        process: [name ^ 0xff; 16],
        unix_name: format!("towline-test-{name}").into_bytes(),
        advertised: AddressList::from_addresses(&["192.0.2.77:7077".parse().unwrap()]).unwrap(),
        features: 0b110 | u64::from(name) << 8,
    }
}

pub fn config(name: u8) -> SessionConfig {
    SessionConfig::new(identity(name))
}

/// A responder for an initiator whose preface is still in its output.
pub fn accept(initiator: &mut Session, config: SessionConfig) -> Result<Session, SessionError> {
    let preface = Preface::decode(initiator.output()[..Preface::LEN].try_into().unwrap()).unwrap();
    initiator.consume_output(Preface::LEN);
    Session::responder(config, &preface)
}

/// Two sessions, the preface exchanged and nothing else.
pub fn pair(initiator: SessionConfig, responder: SessionConfig) -> (Session, Session) {
    let mut initiator = Session::initiator(initiator).unwrap();
    let responder = accept(&mut initiator, responder).unwrap();
    (initiator, responder)
}

/// Moves at most `step` bytes from one session to the other, through `tap`; how many it moved.
fn carry(from: &mut Session, to: &mut Session, step: usize, tap: &mut dyn FnMut(&mut [u8])) -> usize {
    let len = from.output().len().min(step).min(to.input_buffer(step.min(1 << 20)).len());
    // A session that has ended takes no more; its driver reads on and throws the bytes away.
    let len = if to.phase().is_err() { from.output().len() } else { len };
    let mut bytes = from.output()[..len].to_vec();
    from.consume_output(len);
    tap(&mut bytes);
    let _ = to.receive(&bytes);
    len
}

/// What a session reported, as bytes that can be kept: each frame encoded again.
#[derive(Debug, Default, PartialEq)]
pub struct Log {
    pub established: Option<Vec<u8>>,
    pub encrypted: bool,
    pub frames: Vec<Vec<u8>>,
    pub error: Option<SessionError>,
}

impl Log {
    pub fn drain(&mut self, session: &mut Session) {
        loop {
            match session.next_event() {
                Ok(Some(Event::Established(peer))) => {
                    assert!(self.established.is_none() && self.frames.is_empty(), "established first, and once");
                    self.encrypted = peer.encrypted;
                    self.established = Some(encoded(&Frame::Hello(peer.hello)));
                }
                Ok(Some(Event::Frame(frame))) => self.frames.push(encoded(&frame)),
                Ok(None) => return,
                Err(error) => {
                    assert!(self.error.is_none() || self.error.as_ref() == Some(&error), "an error stays the same");
                    self.error = Some(error);
                    return;
                }
            }
        }
    }
}

/// Lets both sessions talk, `step` bytes at a time, until neither has anything to say.
pub fn talk(a: &mut Session, b: &mut Session, step: usize) -> (Log, Log) {
    tapped(a, b, step, |_, _| {})
}

/// As [`talk`]; `tap` sees, and may change, every byte on its way: those of `a` with `true`, those of `b` with `false`.
pub fn tapped(a: &mut Session, b: &mut Session, step: usize, mut tap: impl FnMut(bool, &mut [u8])) -> (Log, Log) {
    let (mut at_a, mut at_b) = (Log::default(), Log::default());
    loop {
        at_a.drain(a);
        at_b.drain(b);
        let there = carry(a, b, step, &mut |bytes| tap(true, bytes));
        let back = carry(b, a, step, &mut |bytes| tap(false, bytes));
        if there + back == 0 {
            return (at_a, at_b);
        }
    }
}

pub fn small() -> Limits {
    Limits { max_frame: MIN_MAX_FRAME, max_backlog: 4 * MIN_MAX_FRAME as usize }
}
