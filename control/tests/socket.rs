//! Sessions over real sockets: TCP over IPv4 and IPv6, and abstract Unix sockets.
#![allow(clippy::unwrap_used)] // in helpers too

mod common;

use common::{config, encoded, fixed_parts, identity};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use towline_control::address::{Address, UnixName};
use towline_control::exchange::{Accepted, Connection, ExchangeError};
use towline_control::preface::{PREFACE_VERSION, Preface, PrefaceError, Purpose};
use towline_control::session::{SessionConfig, SessionError};
use towline_control::socket::{Listener, Received, SocketName, Stream, resolve};
use towline_control::wire::{Frame, Get, Kind, Reject, RejectCode, Target, Versions};

/// Far longer than anything here takes; a test that gets there fails.
fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn tcp_v4() -> SocketName {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()
}

fn unix() -> SocketName {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("towline-control-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    UnixName::new(name.as_bytes()).unwrap().into()
}

/// Every kind of socket that this machine has.
fn names() -> Vec<SocketName> {
    let v6 = SocketName::Tcp((Ipv6Addr::LOCALHOST, 0).into());
    let mut names = vec![tcp_v4(), unix()];
    match Listener::bind(&v6) {
        Ok(_) => names.push(v6),
        Err(error) => assert_eq!(error.source.kind(), ErrorKind::AddrNotAvailable, "only a machine without IPv6"),
    }
    names
}

fn listen(name: &SocketName) -> (Listener, SocketName) {
    let listener = Listener::bind(name).unwrap();
    let name = listener.local_name().unwrap();
    (listener, name)
}

fn control(accepted: Accepted) -> Connection {
    match accepted {
        Accepted::Control(connection) => *connection,
        Accepted::Data { .. } => panic!("a data connection"),
    }
}

/// Both ends of a control connection, or why there is none.
fn both(
    name: &SocketName,
    ours: SessionConfig,
    theirs: SessionConfig,
) -> (Result<Connection, ExchangeError>, Result<Connection, ExchangeError>) {
    let (listener, name) = listen(name);
    thread::scope(|scope| {
        let acceptor = scope.spawn(|| Connection::accept(&listener, theirs, deadline()).map(control));
        let connected = Connection::connect(&name, ours, deadline());
        (connected, acceptor.join().unwrap())
    })
}

fn session_error<T: std::fmt::Debug>(result: Result<T, ExchangeError>) -> SessionError {
    match result {
        Err(ExchangeError::Session(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// Frames of every kind go both ways.
fn converse(mut a: Connection, mut b: Connection) {
    let parts = fixed_parts();
    for (from, to) in [(0, 1), (1, 0)] {
        let ends = [&mut a, &mut b];
        for frame in parts.sendable() {
            ends[from].send(&frame, deadline()).unwrap();
            let got = ends[to].receive(deadline(), |frame| encoded(&frame)).unwrap();
            assert_eq!(got, encoded(&frame));
        }
    }
    drop(a);
    assert!(matches!(b.receive(deadline(), |_| ()), Err(ExchangeError::Closed)));
}

#[test]
fn sessions_run_over_every_kind_of_socket() {
    for name in names() {
        let (a, b) = both(&name, config(1), config(2));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert_eq!((a.peer(), b.peer()), (&identity(2), &identity(1)));
        converse(a, b);
    }
}

#[cfg(feature = "noise")]
#[test]
fn sessions_run_encrypted_over_every_kind_of_socket_or_say_why_not() {
    let with = |name, secret: &str| SessionConfig { secret: Some(secret.parse().unwrap()), ..config(name) };
    let secret = "correct horse battery staple";
    for name in names() {
        let (a, b) = both(&name, with(1, secret), with(2, secret));
        converse(a.unwrap(), b.unwrap());

        for (ours, theirs, code) in [
            (with(1, "not the secret of the other"), with(2, secret), RejectCode::WrongSecret),
            (config(1), with(2, secret), RejectCode::SecretRequired),
            (with(1, secret), config(2), RejectCode::SecretNotExpected),
        ] {
            let (a, b) = both(&name, ours, theirs);
            let error = session_error(a);
            assert!(matches!(error, SessionError::Rejected { code: got, .. } if got == code), "{name}: {error}");
            assert_eq!(session_error(b), SessionError::Refused { code, versions: None });
        }
    }
}

#[test]
fn no_common_version_is_an_error_at_both_ends() {
    let versions = Versions { min: 3, max: 4 };
    for name in names() {
        let (a, b) = both(&name, config(1), SessionConfig { versions, ..config(2) });
        let code = RejectCode::Version;
        assert_eq!(session_error(a), SessionError::Refused { code, versions: Some(versions) });
        assert_eq!(session_error(b), SessionError::Refused { code, versions: Some(Versions::SUPPORTED) });
    }
}

#[test]
fn a_port_is_chosen_published_and_free_again_after_a_restart() {
    let (listener, name) = listen(&tcp_v4());
    let SocketName::Tcp(address) = name else { panic!() };
    assert_ne!(address.port(), 0);
    let taken = Listener::bind(&name).unwrap_err();
    assert_eq!(taken.source.kind(), ErrorKind::AddrInUse);
    assert!(taken.is_retryable() && taken.to_string().contains(&address.to_string()), "{taken}");

    // The accepting end closes first, so its side of the connection lingers on the port.
    let mut client = TcpStream::connect(address).unwrap();
    let accepted = Connection::accept(&listener, config(1), Instant::now());
    assert!(matches!(accepted, Err(ExchangeError::TimedOut { .. })), "{accepted:?}");
    drop(accepted);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    drop((client, listener));
    let (_listener, again) = listen(&name);
    assert_eq!(again, name);
}

#[test]
fn an_abstract_name_is_free_again_when_its_listener_is_gone() {
    let (listener, name) = listen(&unix());
    assert_eq!(Listener::bind(&name).unwrap_err().source.kind(), ErrorKind::AddrInUse);
    drop(listener);
    let (_listener, again) = listen(&name);
    assert_eq!(again, name);
    assert!(Address::from(name).to_string().starts_with("@towline-control-test-"));
}

#[test]
fn where_nobody_listens_the_error_names_the_address() {
    for name in names() {
        let (listener, name) = listen(&name);
        drop(listener);
        let error = Connection::connect(&name, config(1), deadline()).unwrap_err();
        let ExchangeError::Socket(error) = error else { panic!("{error}") };
        assert_eq!(error.source.kind(), ErrorKind::ConnectionRefused);
        assert!(error.is_retryable() && error.operation == "connect", "{error}");
    }
}

#[test]
fn a_data_connection_brings_its_token_and_nothing_of_its_bytes_is_eaten() {
    for name in names() {
        let (listener, name) = listen(&name);
        let token = *b"a one-time token";
        let client = Stream::connect(&name).unwrap();
        let accepted = thread::scope(|scope| {
            let acceptor = scope.spawn(|| Connection::accept(&listener, config(2), deadline()));
            let bytes = [&Preface::new(Purpose::Data { token }).encode()[..], b"payload"].concat();
            while !client.connected().unwrap() {
                thread::yield_now();
            }
            assert_eq!(client.send(&bytes).unwrap(), bytes.len());
            acceptor.join().unwrap().unwrap()
        });
        let Accepted::Data { stream, token: got } = accepted else { panic!("{accepted:?}") };
        assert_eq!(got, token);
        let mut buffer = [0; 64];
        let Received::Bytes(len) = receive(&stream, &mut buffer) else { panic!() };
        assert_eq!(&buffer[..len], b"payload");
    }
}

/// Waits, to the deadline, for bytes or the end.
fn receive(stream: &Stream, buffer: &mut [u8]) -> Received {
    let deadline = deadline();
    loop {
        match stream.receive(buffer).unwrap() {
            Received::Nothing => assert!(Instant::now() < deadline),
            received => return received,
        }
        thread::yield_now();
    }
}

#[test]
fn a_stranger_is_dropped_and_an_old_release_is_told() {
    let (listener, name) = listen(&tcp_v4());
    let SocketName::Tcp(address) = name else { panic!() };
    let accept = |bytes: &[u8]| {
        thread::scope(|scope| {
            let acceptor = scope.spawn(|| Connection::accept(&listener, config(2), deadline()));
            let mut client = TcpStream::connect(address).unwrap();
            client.write_all(bytes).unwrap();
            client.shutdown(std::net::Shutdown::Write).unwrap();
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).unwrap();
            (acceptor.join().unwrap().unwrap_err(), answer)
        })
    };
    let (error, answer) = accept(b"GET / HTTP/1.1\r\nHost: towlines\r\n");
    assert!(matches!(error, ExchangeError::Preface(PrefaceError::Magic)), "{error}");
    assert!(answer.is_empty());

    let mut preface = Preface::new(Purpose::Control).encode();
    preface[8] = 200;
    let (error, answer) = accept(&preface);
    assert!(matches!(error, ExchangeError::Preface(PrefaceError::Version { theirs: 200 })), "{error}");
    let (frame, _) = Frame::decode(&answer, u32::MAX).unwrap().unwrap();
    let versions = Versions { min: PREFACE_VERSION, max: PREFACE_VERSION };
    assert!(matches!(frame, Frame::Reject(Reject { code: RejectCode::Version, versions: v, .. }) if v == versions));

    let (error, _) = accept(&Preface::new(Purpose::Control).encode()[..20]);
    assert!(matches!(error, ExchangeError::Closed), "{error}");
    let (error, _) = accept(&Preface::new(Purpose::Control).encode());
    let end = matches!(error, ExchangeError::Session(SessionError::EndOfStream { unread: 0, .. }));
    assert!(end, "{error}");
}

#[test]
fn the_reason_survives_a_flood_of_unread_bytes() {
    // A peer that has sent much when it is rejected: were the socket closed at once, the kernel would reset it.
    let (listener, name) = listen(&tcp_v4());
    let SocketName::Tcp(address) = name else { panic!() };
    let versions = Versions { min: 9, max: 9 };
    thread::scope(|scope| {
        let theirs = SessionConfig { versions, ..config(2) };
        let acceptor = scope.spawn(|| Connection::accept(&listener, theirs, deadline()));
        let mut flood = towline_control::session::Session::initiator(config(1)).unwrap().output().to_vec();
        let get = fixed_parts();
        let get = get.sendable().into_iter().find(|frame| frame.kind() == Kind::Get).map(|frame| encoded(&frame));
        let get = get.unwrap();
        while flood.len() < 100_000 {
            flood.extend_from_slice(&get);
        }
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(&flood).unwrap();
        let mut answer = Vec::new();
        let mut rest = BufReader::new(&client);
        loop {
            // To the end of the Reject; the acceptor closes only after we do.
            let buffer = rest.fill_buf().unwrap();
            assert!(!buffer.is_empty(), "closed before the reason was here");
            answer.extend_from_slice(buffer);
            let len = buffer.len();
            rest.consume(len);
            let (_, hello) = match Frame::decode(&answer, u32::MAX).unwrap() {
                Some(first) => first,
                None => continue,
            };
            if let Some((last, _)) = Frame::decode(&answer[hello..], u32::MAX).unwrap() {
                assert!(matches!(last, Frame::Reject(Reject { code: RejectCode::Version, .. })), "{last:?}");
                break;
            }
        }
        drop(client);
        assert!(matches!(session_error(acceptor.join().unwrap()), SessionError::Refused { .. }));
    });
}

#[test]
fn a_silent_peer_costs_no_more_than_the_deadline() {
    let soon = || Instant::now() + Duration::from_millis(30);
    let (listener, name) = listen(&tcp_v4());
    let accepted = Connection::accept(&listener, config(2), soon());
    assert!(matches!(accepted, Err(ExchangeError::TimedOut { waiting_for: "accept" })), "{accepted:?}");
    let silent = Stream::connect(&name).unwrap();
    let accepted = Connection::accept(&listener, config(2), soon());
    assert!(matches!(accepted, Err(ExchangeError::TimedOut { waiting_for: "the preface" })), "{accepted:?}");
    drop(silent);
    // The listener's queue takes the connection, and nobody accepts it.
    let connected = Connection::connect(&name, config(1), soon());
    assert!(matches!(connected, Err(ExchangeError::TimedOut { waiting_for: "the peer" })), "{connected:?}");
}

#[test]
fn a_full_connection_takes_no_more_and_an_empty_one_has_nothing() {
    for name in names() {
        let (listener, name) = listen(&name);
        let client = Stream::connect(&name).unwrap();
        let server = loop {
            if let Some(server) = listener.accept().unwrap() {
                break server;
            }
        };
        assert!(client.connected().unwrap());
        let mut buffer = vec![0; 1 << 16];
        assert_eq!(server.receive(&mut buffer).unwrap(), Received::Nothing);
        let mut sent = 0;
        loop {
            match client.send(&buffer).unwrap() {
                0 => break,
                len => sent += len,
            }
            assert!(sent < 1 << 30, "a connection without an end");
        }
        client.shutdown_send().unwrap();
        let mut got = 0;
        while let Received::Bytes(len) = receive(&server, &mut buffer) {
            got += len;
        }
        assert_eq!(got, sent);
    }
}

#[test]
fn an_ipv4_peer_of_an_ipv6_listener_is_known_by_its_ipv4_address() {
    let Ok(listener) = Listener::bind(&SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)).into()) else {
        assert!(names().len() < 3, "a machine with IPv6 binds [::]");
        return;
    };
    if std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only").unwrap().trim() == "1" {
        return;
    }
    let SocketName::Tcp(address) = listener.local_name().unwrap() else { panic!() };
    let client = TcpStream::connect((Ipv4Addr::LOCALHOST, address.port())).unwrap();
    let server = loop {
        if let Some(server) = listener.accept().unwrap() {
            break server;
        }
    };
    assert_eq!(server.peer_address().unwrap(), Some(client.local_addr().unwrap()));
    assert_eq!(server.local_address().unwrap(), Some(client.peer_addr().unwrap()));
    assert!(server.peer_process().unwrap().is_none());
}

#[test]
fn names_are_resolved_and_scopes_get_their_number() {
    let names = resolve(&"localhost:7000".parse().unwrap()).unwrap();
    assert!(!names.is_empty());
    for name in names {
        assert!(matches!(name, SocketName::Tcp(address) if address.ip().is_loopback() && address.port() == 7000));
    }
    let index: u32 = std::fs::read_to_string("/sys/class/net/lo/ifindex").unwrap().trim().parse().unwrap();
    let numbered = resolve(&"[fe80::1%7]:7000".parse().unwrap()).unwrap();
    assert!(matches!(numbered[..], [SocketName::Tcp(SocketAddr::V6(v6))] if v6.scope_id() == 7));
    let named = resolve(&"[fe80::1%lo]:7000".parse().unwrap()).unwrap();
    assert!(matches!(named[..], [SocketName::Tcp(SocketAddr::V6(v6))] if v6.scope_id() == index), "{named:?}");
    let error = resolve(&"[fe80::1%no-such-link]:7000".parse().unwrap()).unwrap_err();
    assert!(error.operation == "resolve" && error.to_string().contains("no-such-link"), "{error}");
}

#[test]
fn descriptors_are_not_inherited_and_do_not_block() {
    let flags = |fd: BorrowedFd<'_>| {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim().to_owned();
        u32::from_str_radix(&flags, 8).unwrap()
    };
    // O_CLOEXEC and O_NONBLOCK of asm-generic/fcntl.h.
    let (cloexec, nonblock) = (0o2_000_000, 0o4_000);
    for name in names() {
        let (listener, name) = listen(&name);
        let client = Stream::connect(&name).unwrap();
        let server = loop {
            if let Some(server) = listener.accept().unwrap() {
                break server;
            }
        };
        for fd in [listener.as_fd(), client.as_fd(), server.as_fd()] {
            assert_eq!(flags(fd) & (cloexec | nonblock), cloexec | nonblock, "{name}");
        }
        if let Some(process) = server.peer_process().unwrap() {
            assert_eq!(flags(process.as_fd()) & cloexec, cloexec);
        }
    }
}

/// Run as a process of its own by the test below: connects, says so, and stays until it is killed.
#[test]
fn child_that_connects() {
    let Ok(name) = std::env::var("TOWLINE_CONTROL_TEST_NAME") else { return };
    let Ok(Address::Unix(name)) = name.parse() else { panic!("{name}") };
    let mut connection = Connection::connect(&name.into(), config(7), deadline()).unwrap();
    connection.send(&fixed_parts().sendable()[0], deadline()).unwrap();
    let _ = connection.receive(deadline(), |_| ());
}

/// Killed and reaped whatever happens to the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_peer_process_is_known_and_its_end_is_seen() {
    let (listener, name) = listen(&unix());
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_connects"])
        .env("TOWLINE_CONTROL_TEST_NAME", name.to_string())
        .stdout(Stdio::null())
        .spawn();
    let mut child = Killed(child.unwrap());
    let mut connection = control(Connection::accept(&listener, config(1), deadline()).unwrap());
    // Now the child has read all that this end has sent, so that its socket closes without a reset.
    connection.receive(deadline(), |_| ()).unwrap();
    let process = connection.stream().peer_process().unwrap().unwrap();
    assert_eq!(process.pid(), child.0.id());
    let owner = std::fs::metadata("/proc/self").map(|meta| {
        use std::os::unix::fs::MetadataExt;
        (meta.uid(), meta.gid())
    });
    assert_eq!((process.uid(), process.gid()), owner.unwrap());
    assert!(!process.has_ended().unwrap());

    child.0.kill().unwrap();
    let closed = connection.receive(deadline(), |_| ());
    assert!(matches!(closed, Err(ExchangeError::Closed)), "{closed:?}");
    // The socket is closed on the way to the end of the process.
    child.0.wait().unwrap();
    assert!(process.has_ended().unwrap());
}

#[test]
fn a_key_too_long_is_refused_here_and_the_connection_lives_on() {
    let (a, b) = both(&unix(), config(1), config(2));
    let (mut a, b) = (a.unwrap(), b.unwrap());
    let parts = fixed_parts();
    let Some(Frame::Get(get)) = parts.sendable().into_iter().find(|frame| frame.kind() == Kind::Get) else { panic!() };
    let error = a.send(&Frame::Get(Get { target: Target::Key(&[0; 2000]), ..get }), deadline()).unwrap_err();
    assert!(error.to_string().contains("key of 2000 (limit 1024)"), "{error}");
    converse(a, b);
}
