//! The text of every kind of error.

use super::*;
use crate::{Missing, Path};
use towline_verbs::Cause;

/// One error of each kind, and of kinds whose way out depends on what they hold one of each sort, with its text behind
/// the operation.
fn table() -> Vec<(ErrorKind, &'static str)> {
    use ErrorKind::*;
    let (why, what, name) = (|| "so".to_owned(), "this", || "w".to_owned());
    let verbs = |verb, cause| Verbs(towline_verbs::Error::new(verb, cause));
    vec![
        (
            KeyTooLong { len: 2000, max: 1024 },
            "the key has 2000 bytes, at most 1024 are allowed (shorten the key, or use its hash)",
        ),
        (KeyEmpty, "the key is empty (give the payload a key of at least one byte)"),
        (
            TicketMalformed { what: "truncated" },
            "not a ticket: truncated (pass the ticket on whole: one word that begins with `towline1:`)",
        ),
        (
            AddressMalformed { text: "localhost".into(), why: "it has none of the forms of one".into() },
            "`localhost` is not an address: it has none of the forms of one (write HOST:PORT, IPV4:PORT, [IPV6]:PORT, \
             [IPV6%SCOPE]:PORT or @NAME)",
        ),
        (
            PartCount { count: 0, max: 1024 },
            "0 parts, allowed are 1 to 1024 (publish at least one part, and many parts as several payloads)",
        ),
        (
            PartMalformed { part: 1, name: name(), what: "length against shape and dtype", have: 4, need: 12 },
            "part 1 `w`: length against shape and dtype: has 4, needs 12 (make name, shape, dtype and bytes agree with \
             the limits and with each other)",
        ),
        (
            ForeignBuffer { part: 1, name: name() },
            "part 1 `w`: its buffer belongs to another endpoint's pool (allocate the buffer from the endpoint that \
             publishes it)",
        ),
        (
            ZeroLength,
            "a buffer of zero bytes (ask for one byte at least; a part without bytes is `Part::bytes` of an empty slice)",
        ),
        (
            PoolTooSmall { need: 2, pool: 1 },
            "2 bytes needed, the whole pool has 1 (build the endpoint with a larger `pool_size`)",
        ),
        (
            PoolFull { need: 3, free: 2, largest: 1 },
            "3 bytes needed, the pool has 2 free, the largest free run is 1 (release buffers and payloads, wait longer, \
             or build the endpoint with a larger `pool_size`)",
        ),
        (
            DestinationTooSmall { need: 2, have: 1 },
            "the destination has 1 bytes, the payload needs 2 (give as many bytes as `Layout::destination_len` of the \
             ticket says)",
        ),
        (
            TimedOut { waiting_for: "a payload to be put under the key", quarantined: 0 },
            "the deadline passed while waiting for a payload to be put under the key (check the key and that its \
             producer puts it, or use a later deadline)",
        ),
        (
            TimedOut { waiting_for: "the payload's bytes", quarantined: 9 },
            "the deadline passed while waiting for the payload's bytes; 9 bytes stay in quarantine until nobody can \
             touch them (use a later deadline, and look at the peer's health)",
        ),
        (
            TimedOut { waiting_for: "consumers", quarantined: 0 },
            "the deadline passed while waiting for consumers (check that consumers get this key from this endpoint, or \
             use a later deadline)",
        ),
        (
            TimedOut { waiting_for: "a connection", quarantined: 0 },
            "the deadline passed while waiting for a connection (check that the peer runs and that its address is \
             reachable from here, or use a later deadline)",
        ),
        (
            TimedOut { waiting_for: "anything: it was in the past", quarantined: 0 },
            "the deadline passed while waiting for anything: it was in the past (use a deadline in the future)",
        ),
        (
            PeerUnreachable {
                address: "192.0.2.1:9".into(),
                errno: libc::ECONNREFUSED,
                tried: "192.0.2.1:9: Connection refused (os error 111)".into(),
            },
            "no connection to 192.0.2.1:9: Connection refused (os error 111) (check that the peer runs, its port, and \
             that it advertises an address reachable from here)",
        ),
        (
            PeerLost { why: why() },
            "the peer is gone: so (look at why the peer ended or the network broke, then get again)",
        ),
        (WrongSecret, "the peer has another secret (give both endpoints the same secret)"),
        (SecretRequired, "the peer wants a secret and none is set here (set the peer's secret with `Builder::secret`)"),
        (
            SecretNotExpected,
            "a secret is set here and the peer has none (set the same secret at the peer, or none here)",
        ),
        (
            VersionMismatch { ours: (1, 2), theirs: (3, 4) },
            "the peer speaks versions 3 to 4 of the protocol, this build 1 to 2 (run builds of neighbouring versions at \
             both ends)",
        ),
        (
            Protocol { what: why() },
            "the peer broke the protocol: so (check that the address is an endpoint's, and run the same build at both \
             ends)",
        ),
        (
            PathNotAllowed { allowed: "tcp".into(), why: why() },
            "no path to the peer among those allowed (tcp): so (allow another path with `Builder::allow_paths`, at both \
             ends)",
        ),
        (
            PathUnsuitable { path: Path::Tcp, lacks: "views" },
            "the path to this peer is tcp, which has no views (use `get` instead of `view`)",
        ),
        (
            Gone(super::Gone::Consumed),
            "the payload is not there: all its consumers have had it (publish it for more consumers: `put_with` with \
             `PutOptions::consumers`)",
        ),
        (
            Gone(super::Gone::Expired),
            "the payload is not there: it expired (publish it with a longer `PutOptions::time_to_live`)",
        ),
        (
            Gone(super::Gone::Removed),
            "the payload is not there: its producer removed it (ask its producer to put it again)",
        ),
        (
            Gone(super::Gone::Replaced),
            "the payload is not there: another payload was put under its key (get it by its key, or by the newest \
             ticket)",
        ),
        (
            Gone(super::Gone::OtherIncarnation),
            "the payload is not there: it is another endpoint's, or its producer was started anew since (get a new ticket from the producer)",
        ),
        (
            Gone(super::Gone::Unknown),
            "the payload is not there: its producer does not know it (get a new ticket from the producer, or get it by \
             its key)",
        ),
        (
            LeaseExpired,
            "the lease ran out before all bytes had arrived; nothing was delivered (get again; if the consumer was \
             stopped or the network slow, build the producer with a longer `lease`)",
        ),
        (
            LayoutMismatch { what },
            "the payload is not as announced: this (get a new ticket, and run the same build at both ends)",
        ),
        (
            TransferFailed { status: "flushed", vendor: 7, tries: 4 },
            "reading failed 4 times: flushed (code 7) (look at the network and at the peer, then get again)",
        ),
        (
            Busy { what: "payloads", limit: 5 },
            "too many payloads: the limit is 5 (wait until some have ended, or build the endpoint concerned with higher \
             `Limits`)",
        ),
        (Cancelled, "cancelled (call again if the result is still wanted)"),
        (Closed, "the endpoint is closed (build a new endpoint)"),
        (Forked, "the endpoint belongs to the parent process (build an endpoint in the child process)"),
        (
            Insecure { address: "192.0.2.1:9".into() },
            "192.0.2.1:9 lies beyond this host and no secret is set (set a `secret`, use loopback, or allow it by name \
             with `insecure`)",
        ),
        (
            NoRdma { missing: Missing::KernelSupport, why: "no ib_uverbs".into() },
            "no RDMA on this machine: no ib_uverbs (install or load what is missing, or allow another path with \
             `Builder::allow_paths`)",
        ),
        (
            BadOption { option: "rdma_device", why: "`mlx5_9` is not here; here are mlx5_0:1 (GIDs 0, 1)".into() },
            "option `rdma_device`: `mlx5_9` is not here; here are mlx5_0:1 (GIDs 0, 1) (write NAME, NAME:PORT or \
             NAME:PORT:GID_INDEX as `towline devices` lists them)",
        ),
        (
            BadOption { option: "pool_size", why: "it is zero".into() },
            "option `pool_size`: it is zero (give one byte at least)",
        ),
        (
            BadOption { option: "granule", why: "it is 100".into() },
            "option `granule`: it is 100 (give a power of two from 64 to 2,097,152 bytes that is no larger than the pool)",
        ),
        (
            BadOption { option: "limits.gets", why: "it is zero".into() },
            "option `limits.gets`: it is zero (give one at least)",
        ),
        (
            BadOption { option: "limits.backlog", why: "it is 0".into() },
            "option `limits.backlog`: it is 0 (give 8 KiB at least)",
        ),
        (
            BadOption { option: "time_to_live", why: "it is zero".into() },
            "option `time_to_live`: it is zero (give a time that is longer than nothing)",
        ),
        (
            Type(crate::TypeError::DType(crate::DType::F16)),
            "the part holds elements of dtype f16 (ask for the type that it stands for)",
        ),
        (
            Type(crate::TypeError::OutOfRange { first: 7, count: 4, elements: 10 }),
            "4 elements from number 7 on do not lie within the 10 that there are (ask for fewer, or from an earlier one on)",
        ),
        (
            Os { call: "listen", errno: libc::EADDRINUSE },
            "listen: Address already in use (os error 98) (choose a port that nobody listens at, or port 0 for one of \
             the system's choice)",
        ),
        (
            Os { call: "epoll", errno: libc::EMFILE },
            "epoll: Too many open files (os error 24) (raise the limit of open files (`ulimit -n`))",
        ),
        (
            verbs("allocate_memory", Cause::Os { errno: libc::ENOMEM, call: "mmap" }),
            "allocate_memory: mmap: Cannot allocate memory (os error 12) (build the endpoint with a smaller `pool_size`, \
             or free memory)",
        ),
        (
            verbs("reg_mr", Cause::Limit { what: "memlock (ulimit -l)", have: 65536, need: 1 << 20 }),
            "reg_mr: memlock (ulimit -l) is 65536, needed 1048576 (raise the limit of locked memory (`ulimit -l`), or build \
             the endpoint with a smaller `pool_size`)",
        ),
        (
            verbs("create_qp", Cause::Limit { what: "queue pairs", have: 1, need: 2 }),
            "create_qp: queue pairs is 1, needed 2 (wait until operations have ended, or raise that limit)",
        ),
    ]
}

#[test]
fn every_text_tells_the_cause_and_the_way_out() {
    for (kind, text) in table() {
        let error = Error::new("get", kind);
        assert_eq!(error.to_string(), format!("get: {text}"));
        assert!(!text.contains('\n') && error.way_out().is_some());
        assert_eq!(format!("{error:?}"), error.to_string(), "what `unwrap` and `main` show");
        assert!(format!("{error:#?}").starts_with("Error {\n    operation: \"get\",\n"));
    }
}

/// The documentation of each variant in this file's neighbour, by the variant's name.
fn documented() -> Vec<(String, String)> {
    let source = include_str!("kind.rs");
    let mut found = vec![];
    let mut doc = String::new();
    for line in source.lines() {
        match line.strip_prefix("    ///") {
            Some(text) => doc.push_str(&text.replace('\\', "")),
            None => {
                let name = line.trim_start().split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
                if line.starts_with("    ") && !line.starts_with("     ") && !doc.is_empty() {
                    found.push((name.to_owned(), std::mem::take(&mut doc)));
                }
                doc.clear();
            }
        }
    }
    found
}

#[test]
fn the_documentation_of_every_kind_gives_its_way_out_and_whether_to_retry() {
    let documented = documented();
    let debug = |kind: &ErrorKind| format!("{kind:?}");
    let of = |name: &str| documented.iter().find(|(known, _)| known == name).map(|(_, doc)| doc.clone());
    let mut seen = std::collections::BTreeSet::new();
    for (kind, _) in table() {
        let text = debug(&kind);
        let name = text.split(|c: char| !c.is_alphanumeric()).next().unwrap();
        seen.insert(name.to_owned());
        let doc = of(name).unwrap_or_else(|| panic!("{name} is not documented"));
        let varies = matches!(name, "TimedOut" | "Gone" | "BadOption" | "Os" | "Type" | "Verbs");
        let way_out = if varies { "by " } else { kind.way_out() };
        assert!(doc.contains(&format!("Way out: {way_out}")), "{name}: {doc}");
        let retry = if name == "Verbs" {
            "as"
        } else if kind.can_retry() {
            "yes"
        } else {
            "no"
        };
        assert!(doc.contains(&format!("Retry: {retry}")), "{name}: {doc}");
        if let ErrorKind::Gone(gone) = &kind {
            let doc = of(&format!("{gone:?}")).unwrap_or_default();
            assert!(doc.contains(&format!("Way out: {}.", kind.way_out())), "{gone:?}: {doc}");
        }
    }
    let kinds = documented.iter().filter(|(_, doc)| doc.contains("Retry:")).count();
    assert_eq!(seen.len(), kinds, "the table has every kind");
}

#[test]
fn nothing_is_named_twice_and_everything_is_short() {
    let subject = |what: &str, peer: &str| Subject { what: what.into(), peer: peer.into() };
    let lost = ErrorKind::PeerLost { why: "reset".into() };
    let text = Error::new("get", lost).about_subject(subject("key `k`", "192.0.2.1:9")).to_string();
    assert!(text.starts_with("get: key `k` at 192.0.2.1:9: the peer is gone: reset ("), "{text}");
    let refused = |tried: &str| ErrorKind::PeerUnreachable { address: "h:9".into(), errno: 111, tried: tried.into() };
    for tried in
        ["", "h:9: Connection refused (os error 111)", "connect h:9: Connection refused (os error 111)", "all failed"]
    {
        let text = Error::new("get", refused(tried)).about_subject(subject("key `k`", "h:9")).to_string();
        assert!(text.starts_with("get: key `k`: no connection to h:9: "), "{text}");
        assert_eq!((text.matches("h:9").count(), text.matches("refused").count()), (1, 1), "{text}");
    }
    let starved = ErrorKind::PeerUnreachable { address: "h:9".into(), errno: libc::EMFILE, tried: String::new() };
    let text = Error::new("get", starved).to_string();
    assert!(
        text.ends_with("Too many open files (os error 24) (raise the limit of open files (`ulimit -n`))"),
        "{text}"
    );
    assert_eq!(printable(b"plain key"), "plain key");
    assert_eq!(printable(b"a\nb\xff`"), "a\\nb\\xff`");
    assert_eq!(printable(&[b'x'; 1000]).len(), 83);
}
