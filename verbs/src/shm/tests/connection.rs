//! Connecting: addresses, tokens, credentials, and what is left afterwards.

use super::support::*;
use crate::shm::{ShmConfig, ShmProvider, sys};
use crate::{Access, Cause, Device, Error, Opcode, Provider, QueuePairCapacity, QueuePairState, Token};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

#[test]
fn a_device_says_what_it_can_do() {
    let provider = ShmProvider::new(ShmConfig::new(fresh_name(), preface)).unwrap();
    let devices = provider.devices().unwrap();
    assert_eq!(devices.len(), 1);
    let device = provider.open(&devices[0].name).unwrap();
    assert_eq!(device.info(), &devices[0]);
    let capabilities = device.info().capabilities;
    assert!(capabilities.mappable && capabilities.reads_by_cpu && !capabilities.scoped_keys);
    assert!(capabilities.preferred_chunk <= capabilities.max_message_size);
    assert!(device.info().description.contains(crate::copy::best().routine.name()), "{}", device.info().description);
    assert!(matches!(provider.open("shm1").unwrap_err().cause, Cause::NotFound { .. }));
    assert!(!device.supports(crate::MemoryKind::Device));
}

#[test]
fn a_name_has_a_length() {
    for len in [0, 108] {
        let error = ShmProvider::new(ShmConfig::new(vec![b'x'; len], preface)).unwrap_err();
        assert!(matches!(error.cause, Cause::OutOfRange { .. }), "{error}");
    }
    ShmProvider::new(ShmConfig::new(vec![b'x'; 107], preface)).unwrap();
}

#[test]
fn queues_are_as_deep_as_what_is_attached() {
    let a = End::new();
    for depth in [0, u32::MAX] {
        assert!(matches!(a.device.create_cq(depth).unwrap_err().cause, Cause::Limit { .. }));
    }
    let cq = a.device.create_cq(20).unwrap();
    let capacity = |max_send_wr, max_recv_wr| QueuePairCapacity { max_send_wr, max_recv_wr };
    let create = |capacity| a.pd.create_qp(&cq, &cq, capacity);
    let cause = |capacity| create(capacity).unwrap_err().cause;
    assert!(matches!(cause(capacity(10, 11)), Cause::Limit { have: 20, need: 21, .. }));
    assert!(matches!(cause(capacity(1 << 20, 0)), Cause::Limit { what: "max_send_wr", .. }));
    assert!(matches!(cause(capacity(0, 1 << 20)), Cause::Limit { what: "max_recv_wr", .. }));
    let first = create(capacity(10, 5)).unwrap();
    assert!(matches!(cause(capacity(6, 0)), Cause::Limit { have: 20, need: 21, .. }));
    post_receive(&first, 1, None).unwrap();
    post_receive(&first, 2, None).unwrap();
    drop(first);
    // Its two flushed receives still take their places, until they are polled.
    assert!(matches!(cause(capacity(19, 0)), Cause::Limit { have: 20, need: 21, .. }));
    let mut out = Vec::new();
    assert_eq!(cq.poll(&mut out, 10), 2);
    create(capacity(10, 10)).unwrap();
    let other = End::new();
    let error = a.pd.create_qp(&other.cq, &other.cq, CAPACITY).unwrap_err();
    assert!(matches!(error.cause, Cause::Unsupported { .. }), "{error}");
}

#[test]
fn connecting_goes_through_its_states() {
    let (a, b) = (End::new(), End::new());
    let (qa, qb) = (a.queue_pair(), b.queue_pair());
    assert_eq!((qa.state(), qb.state()), (QueuePairState::Reset, QueuePairState::Reset));
    assert!(qa.address().len() <= 512);
    qb.connect(&qa.address(), true).unwrap();
    assert_eq!(qb.state(), QueuePairState::Connecting);
    let again = qb.connect(&qa.address(), true).unwrap_err();
    assert!(matches!(again.cause, Cause::State { is: QueuePairState::Connecting, .. }), "{again}");
    // The stream comes before the passive end was told of the other: it waits. (Dialling a Unix socket is done at once.)
    a.turn();
    assert_eq!(qa.state(), QueuePairState::Reset);
    qa.connect(&qb.address(), false).unwrap();
    drive(&[&a, &b], || [&qa, &qb].iter().all(|qp| qp.state() == QueuePairState::ReadyToSend));
    assert!(qa.failure().is_none() && qb.failure().is_none());
}

#[test]
fn a_bad_address_is_malformed_and_leaves_the_queue_pair_as_it_was() {
    let (a, b) = (End::new(), End::new());
    let (qa, qb) = (a.queue_pair(), b.queue_pair());
    let good = qa.address();
    for bad in [vec![], vec![0; 22], good[..good.len() - 1].to_vec(), [&good[..], b"x"].concat(), vec![0xff; 512]] {
        for active in [true, false] {
            let error = qb.connect(&bad, active).unwrap_err();
            assert!(matches!(error.cause, Cause::Malformed { .. }), "{error}");
        }
    }
    assert_eq!(qb.state(), QueuePairState::Reset);
    join(&a, &qa, &b, &qb);
}

#[test]
fn nobody_listening_is_told() {
    let b = End::new();
    let qb = b.queue_pair();
    let address = End::new().queue_pair().address(); // of an endpoint that is gone
    qb.connect(&address, true).unwrap();
    drive(&[&b], || qb.state() == QueuePairState::Error);
    let failure = qb.failure().unwrap();
    assert_eq!(failure.cause, Cause::Os { errno: libc::ECONNREFUSED, call: "connect" });
    assert!(qb.is_fenced());
}

#[test]
fn a_full_backlog_is_dialled_again() {
    let (a, b) = (End::new(), End::new());
    // A listener that accepts nothing for now, with room for few.
    let fd = a.listener.as_raw_fd();
    // SAFETY: listen takes integers; on a listening socket it changes the backlog.
    assert_eq!(unsafe { libc::listen(fd, 0) }, 0);
    let address = a.listener.local_addr().unwrap();
    let filler = UnixStream::connect_addr(&address).unwrap();
    let (qa, qb) = (a.queue_pair(), b.queue_pair());
    qa.connect(&qb.address(), false).unwrap();
    qb.connect(&qa.address(), true).unwrap();
    assert_eq!((qb.state(), qb.failure()), (QueuePairState::Connecting, None));
    // While the filler is there, `b` comes again and again.
    for _ in 0..3 {
        wait_readable(&b);
        b.device.progress();
    }
    assert_eq!(qb.state(), QueuePairState::Connecting);
    drop(a.listener.accept().unwrap());
    drop(filler);
    drive(&[&a, &b], || [&qa, &qb].iter().all(|qp| qp.state() == QueuePairState::ReadyToSend));
}

fn stream_pair() -> (OwnedFd, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (ours.into(), theirs)
}

fn adopt_fails(device: &Device, token: Token) -> Error {
    device.adopt(stream_pair().0, token).unwrap_err()
}

#[test]
fn a_token_is_good_once_and_only_whole() {
    let a = End::new();
    let qa = a.queue_pair();
    let token = token_of(&qa);
    for byte in 0..16 {
        let mut other = token;
        other.0[byte] ^= 1;
        assert!(matches!(adopt_fails(&a.device, other).cause, Cause::NotFound { .. }));
    }
    let (ours, theirs) = stream_pair();
    a.device.adopt(ours, token).unwrap();
    assert!(matches!(adopt_fails(&a.device, token).cause, Cause::NotFound { .. }));
    drop((qa, theirs));
    assert!(matches!(adopt_fails(&a.device, token).cause, Cause::NotFound { .. }));
}

#[test]
fn a_queue_pair_that_dials_is_not_dialled() {
    let (a, b) = (End::new(), End::new());
    let (qa, qb) = connect(&a, &b);
    for (end, qp) in [(&a, &qa), (&b, &qb)] {
        assert!(matches!(adopt_fails(&end.device, token_of(qp)).cause, Cause::NotFound { .. }));
        assert_eq!(qp.state(), QueuePairState::ReadyToSend);
    }
}

#[test]
fn a_refused_stream_is_closed() {
    use std::io::Read;
    let a = End::new();
    let (ours, mut theirs) = stream_pair();
    a.device.adopt(ours, Token([0; 16])).unwrap_err();
    assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
}

#[test]
fn only_unix_streams_are_adopted() {
    let a = End::new();
    let qa = a.queue_pair();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let tcp = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let datagram = std::os::unix::net::UnixDatagram::pair().unwrap().0;
    for fd in [OwnedFd::from(tcp), OwnedFd::from(datagram), OwnedFd::from(std::fs::File::open("/dev/null").unwrap())] {
        let error = a.device.adopt(fd, token_of(&qa)).unwrap_err();
        assert!(matches!(error.cause, Cause::Unsupported { .. }), "{error}");
    }
    a.device.adopt(stream_pair().0, token_of(&qa)).unwrap(); // the token is still good
}

#[test]
fn processes_of_other_users_are_refused_on_both_sides() {
    // The list does not name this process's own user, which is who dials and listens here.
    let stranger = End::with(|config| config.allowed_uids = Some(vec![sys::own_uid().wrapping_add(1)]));
    let b = End::new();
    let (qs, qb) = (stranger.queue_pair(), b.queue_pair());
    let error = stranger.device.adopt(stream_pair().0, token_of(&qs)).unwrap_err();
    assert!(matches!(error.cause, Cause::Denied { .. }), "{error}");
    qs.connect(&qb.address(), true).unwrap();
    assert_eq!(qs.state(), QueuePairState::Error);
    assert!(matches!(qs.failure().unwrap().cause, Cause::Denied { .. }));

    let friend = End::with(|config| config.allowed_uids = Some(vec![sys::own_uid().wrapping_add(1), sys::own_uid()]));
    connect(&friend, &b);
}

#[test]
fn a_listener_that_does_not_know_our_token_learns_no_region() {
    use std::io::{Read, Write};
    // Somebody else took the name before the endpoint could.
    let name = fresh_name();
    let squatter = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let b = End::new();
    let _secret = b.region(4096, Access::REMOTE_READ, 1);
    let qb = b.queue_pair();
    let mut address = b.queue_pair().address()[..22].to_vec();
    address[1] = name.len() as u8;
    address.extend_from_slice(&name);
    qb.connect(&address, true).unwrap();
    let (mut stream, _) = squatter.accept().unwrap();
    let mut received = [0; 20 + 64];
    stream.read_exact(&mut received).unwrap();
    // It sends the greeting back, the best that it can do.
    stream.write_all(&received[20..]).unwrap();
    drive(&[&b], || qb.state() == QueuePairState::Error);
    assert!(matches!(qb.failure().unwrap().cause, Cause::Malformed { .. }));
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).ok();
    assert!(rest.is_empty(), "it was sent {} bytes", rest.len());
}

#[test]
fn many_queue_pairs_between_two_devices_map_a_segment_once() {
    let (a, b) = (End::new(), End::new());
    let source = a.region(7 << 20, Access::REMOTE_READ, 1);
    let again = a.pd.register(source.memory().clone(), Access::REMOTE_READ).unwrap();
    let target = b.region(7 << 20, Access::LOCAL_WRITE, 2);
    let pairs: Vec<_> = (0..8).map(|_| connect(&a, &b)).collect();
    let mut views = Vec::new();
    for (id, (_, qb)) in pairs.iter().enumerate() {
        for region in [&source, &again] {
            let remote = region.remote(0, 7 << 20).unwrap();
            post(qb, vec![request(id as u64, Opcode::Read, vec![slice(&target, 0, 7 << 20)], Some(remote))]).unwrap();
            wait_for(&[&a, &b], &b, 1);
            assert!(bytes_of(&target, 0, 7 << 20) == pattern(7 << 20, 1));
            views.push(qb.map(remote).unwrap().as_ptr());
        }
    }
    views.dedup();
    assert_eq!(views.len(), 1, "mapped at {views:?}");
}
