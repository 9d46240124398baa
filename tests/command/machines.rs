//! Two commands, one that listens and one that connects, and who else calls.

use crate::*;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

#[test]
fn an_unreachable_producer_is_a_failure() {
    // A port that was bound and is free again: nobody listens there.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let output = run(&format!("bench --connect 127.0.0.1:{port}"));
    assert_eq!(output.status.code(), Some(1));
    let errors = text(&output.stderr);
    assert!(errors.contains(&format!("connecting to 127.0.0.1:{port}")), "{errors}");
    assert!(errors.contains(&format!("is `towline bench --listen 127.0.0.1:{port}` running there?")), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

#[test]
fn a_server_of_another_kind_is_told_from_a_bench() {
    for answer in [Some("HTTP/1.0 400 Bad Request\r\n\r\n"), Some("x"), None] {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = server.accept().unwrap();
            stream.write_all(answer.unwrap_or_default().as_bytes()).unwrap();
            // Until the client leaves: it must do so by itself.
            let _broken = stream.read_to_end(&mut vec![]);
        });
        let output = run(&format!("bench --connect {address}"));
        serving.join().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains("it does not answer as `towline bench --listen` does"), "{errors}");
        assert!(errors.contains(&address.to_string()), "{errors}");
    }
}

#[test]
fn two_commands_meet_by_listen_and_connect() {
    let mut producer = Process::start("bench --listen 127.0.0.1:0");
    let address = producer.listening();
    let rows = rows(&format!("--connect {address} --path tcp --size 300KiB --count 9 --verify full"));
    assert_eq!(rows.len(), 4);
    for row in rows {
        assert_eq!((&row["clock"], &row["verified"], &row["path"]), (&"consumer".into(), &true.into(), &"tcp".into()));
        assert!(row["rtt_us"].as_f64().unwrap() > 0.0);
        assert_eq!(row["limit_variant"].is_null(), row["mode"] == "serialized");
    }
    assert!(producer.line().ends_with(": a bench begins"));
    assert!(producer.line().ends_with(": the bench has ended"));
    assert_eq!(producer.end(), Some(0), "the listening side ends with the bench");
}

#[test]
fn strangers_are_dropped_with_a_line_and_hold_up_nobody() {
    let mut producer = Process::start("bench --listen 127.0.0.1:0");
    let address = producer.listening();
    let silent = TcpStream::connect(&address).unwrap();
    let dripping = TcpStream::connect(&address).unwrap();
    (&dripping).write_all(b"\x20\0").unwrap();
    let other_build = br#"{"bench":"towline 0.0.1"}"#;
    let other_build = [&(other_build.len() as u32).to_le_bytes()[..], other_build].concat();
    let cases: [(&[u8], &str); 5] = [
        (b"GET / HTTP/1.0\r\n\r\n", "it begins with \"GET \""),
        (b"\xff\xff\xff\xff", "it is no `towline bench --connect`"),
        (b"\x02\0\0\0{]", "it is no `towline bench --connect`"),
        (b"", "closed the connection without a greeting"),
        (&other_build, "the other end is of towline 0.0.1"),
    ];
    for (bytes, why) in cases {
        let mut stranger = TcpStream::connect(&address).unwrap();
        let own = stranger.local_addr().unwrap();
        stranger.write_all(bytes).unwrap();
        let _dropped_already = stranger.shutdown(Shutdown::Write);
        let line = producer.line();
        assert!(line.starts_with(&format!("{own}: dropped: ")), "{line}");
        assert!(line.contains(why) && line.ends_with("still listening"), "{line}");
        let mut answer = vec![];
        let _reset = stranger.read_to_end(&mut answer);
        assert_eq!(answer.is_empty(), !why.contains("0.0.1"), "who has another build is told: {answer:?}");
    }
    let rows = rows(&format!("--connect {address} --path tcp --mode zero-copy --size 4KiB --count 3"));
    assert_eq!(rows.len(), 1, "the silent ones are still there and hold up nobody");
    // More than five seconds may have passed under load: then the two were dropped before.
    let lines: Vec<String> = std::iter::from_fn(|| Some(producer.line()).filter(|line| !line.is_empty())).collect();
    assert!(lines.iter().filter(|line| line.contains("dropped")).count() <= 2, "{lines:?}");
    assert!(lines.iter().any(|line| line.ends_with("a bench begins")), "{lines:?}");
    assert_eq!(producer.end(), Some(0));
    drop((silent, dripping));
}

#[test]
fn the_silent_are_dropped_in_time_and_never_too_many() {
    const MOST: usize = 64;
    let mut producer = Process::start("bench --listen 127.0.0.1:0");
    let address = producer.listening();
    let strangers: Vec<_> = (0..=MOST).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let named = |index: usize| strangers[index].local_addr().unwrap().to_string();
    let line = producer.line();
    assert!(line.starts_with(&named(0)) && line.contains("too many connections"), "{line}");
    for index in 1..=MOST {
        let line = producer.line();
        assert!(line.starts_with(&named(index)) && line.contains("no greeting for 5 s"), "{index}: {line}");
    }
    for mut stranger in strangers {
        assert_eq!(stranger.read(&mut [0]).unwrap(), 0, "it is closed");
    }
    assert_eq!(rows(&format!("--connect {address} --mode zero-copy --size 4KiB --count 1")).len(), 1);
    assert_eq!(producer.end(), Some(0));
}

#[test]
fn connections_beyond_the_limit_of_open_files_make_the_oldest_go_at_once() {
    const FILES: usize = 12;
    let mut limited = Command::new("sh");
    limited.args(["-c", &format!("ulimit -n {FILES} && exec \"$0\" bench --listen 127.0.0.1:0")]);
    limited.arg(env!("CARGO_BIN_EXE_towline")).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut producer = Process(limited.spawn().unwrap());
    let address = producer.listening();
    let strangers: Vec<_> = (0..2 * FILES).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let line = producer.line();
    assert!(line.starts_with(&strangers[0].local_addr().unwrap().to_string()), "{line}");
    assert!(line.contains("could not be accepted: Too many open files"), "{line}");
}
