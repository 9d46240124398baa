use super::*;

const A: NodeId = NodeId(1);
const B: NodeId = NodeId(2);

fn drain(net: &SimNet, node: NodeId) -> Vec<NetEvent> {
    core::iter::from_fn(|| net.poll(node)).collect()
}

/// A connection from A to B: A's end, B's end.
fn connected(fabric: &SimFabric) -> (ConnId, ConnId) {
    let net = fabric.net();
    net.listen(B, 7, true);
    let near = net.dial(A, B, 7);
    run(fabric);
    assert_eq!(drain(&net, A), [NetEvent::Connected { conn: near }]);
    match drain(&net, B)[..] {
        [NetEvent::Accepted { conn, from: A, port: 7 }] => (near, conn),
        ref other => panic!("{other:?}"),
    }
}

/// The bytes that `conn` got, and whether it closed.
fn collect(events: &[NetEvent], conn: ConnId) -> (Vec<u8>, bool) {
    let (mut bytes, mut closed) = (Vec::new(), false);
    for event in events {
        match event {
            NetEvent::Bytes { conn: at, data } if *at == conn => {
                assert!(!closed && !data.is_empty());
                bytes.extend_from_slice(data);
            }
            NetEvent::Closed { conn: at } if *at == conn => {
                assert!(!closed, "told twice");
                closed = true;
            }
            other => panic!("{other:?}"),
        }
    }
    (bytes, closed)
}

fn message(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31) ^ salt).collect()
}

#[test]
fn bytes_arrive_in_order_in_both_directions_and_in_pieces() {
    let (mut split, mut joined) = (0, 0);
    for seed in 0..100 {
        let fabric = SimFabric::new(seed, FaultPlan::calm());
        let net = fabric.net();
        let (a, b) = connected(&fabric);
        let (mut sent, mut back) = (Vec::new(), Vec::new());
        for i in 0..10u8 {
            let bytes = message(1 + usize::from(i) * 13, i);
            net.send(a, &bytes);
            sent.extend(bytes);
            let bytes = message(50, i ^ 0x80);
            net.send(b, &bytes);
            back.extend(bytes);
        }
        net.send(a, b"");
        run(&fabric);
        let at_b = drain(&net, B);
        assert_eq!(collect(&at_b, b), (sent, false));
        assert_eq!(collect(&drain(&net, A), a), (back, false));
        joined += u32::from(at_b.len() == 1);
        let fabric = SimFabric::new(seed, FaultPlan::calm());
        let net = fabric.net();
        let (a, b) = connected(&fabric);
        net.send(a, &message(100, 0));
        let mut arrivals = 0;
        while step(&fabric) {
            arrivals += drain(&net, B).len();
        }
        split += u32::from(arrivals > 1);
        let _ = b;
    }
    assert!(joined > 50 && split > 30, "{joined} {split}");
}

#[test]
fn a_dial_to_a_node_that_does_not_listen_is_refused() {
    let fabric = SimFabric::new(1, FaultPlan::calm());
    let net = fabric.net();
    let near = net.dial(A, B, 7);
    net.send(near, b"too early");
    run(&fabric);
    assert_eq!(drain(&net, A), [NetEvent::Refused { conn: near }]);
    assert_eq!((drain(&net, B), net.open_ends()), (vec![], 0));
    net.listen(B, 7, true);
    net.listen(B, 8, true);
    net.listen(B, 7, false);
    let near = net.dial(A, B, 7);
    run(&fabric);
    assert_eq!(drain(&net, A), [NetEvent::Refused { conn: near }]);
}

#[test]
fn bytes_sent_before_the_connection_stands_come_after_it() {
    for seed in 0..50 {
        let fabric = SimFabric::new(seed, FaultPlan::calm());
        let net = fabric.net();
        net.listen(B, 7, true);
        let near = net.dial(A, B, 7);
        net.send(near, b"hello");
        run(&fabric);
        let events = drain(&net, B);
        let NetEvent::Accepted { conn, .. } = events[0] else { panic!("{events:?}") };
        assert_eq!(collect(&events[1..], conn).0, b"hello");
        net.send(conn, b"welcome");
        run(&fabric);
        let events = drain(&net, A);
        assert_eq!(events[0], NetEvent::Connected { conn: near });
        assert_eq!(collect(&events[1..], near).0, b"welcome");
    }
}

#[test]
fn a_node_may_dial_itself() {
    let fabric = SimFabric::new(1, FaultPlan::calm());
    let net = fabric.net();
    net.listen(A, 7, true);
    let near = net.dial(A, A, 7);
    run(&fabric);
    let events = drain(&net, A);
    let NetEvent::Accepted { conn: far, from: A, .. } = events[0] else { panic!("{events:?}") };
    assert_eq!(events[1..], [NetEvent::Connected { conn: near }]);
    net.send(far, b"x");
    run(&fabric);
    assert_eq!(drain(&net, A), [NetEvent::Bytes { conn: near, data: b"x".to_vec() }]);
}

#[test]
fn closing_delivers_what_was_sent_and_then_says_so() {
    let fabric = SimFabric::new(2, FaultPlan::calm());
    let net = fabric.net();
    let (a, b) = connected(&fabric);
    net.send(a, &message(500, 1));
    net.send(b, b"crosses the close");
    net.close(a);
    net.close(a);
    net.send(a, b"after");
    run(&fabric);
    assert_eq!(collect(&drain(&net, B), b), (message(500, 1), true));
    assert!(drain(&net, A).is_empty(), "the closer is told nothing more");
    net.send(b, b"to nobody");
    net.close(b);
    run(&fabric);
    assert_eq!(net.open_ends(), 0);
}

#[test]
fn a_reset_keeps_a_prefix_and_tells_both() {
    let mut shorter = 0;
    for seed in 0..60 {
        let mut plan = FaultPlan::calm();
        plan.net.reset = Chance(100_000);
        let fabric = SimFabric::new(seed, plan);
        let net = fabric.net();
        let (a, b) = connected(&fabric);
        let mut sent = Vec::new();
        for i in 0..60 {
            let bytes = message(40, i);
            net.send(a, &bytes);
            sent.extend(bytes);
            let until = fabric.now() + 10_000;
            fabric.advance_to(until);
        }
        run(&fabric);
        let (bytes, closed) = collect(&drain(&net, B), b);
        assert!(sent.starts_with(&bytes));
        shorter += u32::from(bytes.len() < sent.len());
        assert_eq!(closed, bytes.len() < sent.len());
        assert_eq!(collect(&drain(&net, A), a), (vec![], closed));
    }
    assert!(shorter > 50, "{shorter}");
}

#[test]
fn a_reset_by_hand_loses_what_is_on_its_way() {
    let fabric = SimFabric::new(2, FaultPlan::calm());
    let net = fabric.net();
    let (a, b) = connected(&fabric);
    net.send(a, b"lost");
    net.reset(b);
    run(&fabric);
    assert_eq!(drain(&net, A), [NetEvent::Closed { conn: a }]);
    assert_eq!(drain(&net, B), [NetEvent::Closed { conn: b }]);
    assert_eq!((net.open_ends(), fabric.counts().resets), (0, 1));
}

#[test]
fn a_silent_connection_says_nothing_at_all() {
    let mut plan = FaultPlan::calm();
    let fabric = SimFabric::new(2, plan.clone());
    let net = fabric.net();
    let (a, b) = connected(&fabric);
    net.send(b, b"was on its way");
    plan.net.silence = Chance::ALWAYS;
    fabric.set_plan(plan);
    net.send(a, b"x");
    net.send(b, b"y");
    net.close(a);
    run(&fabric);
    assert!(drain(&net, A).is_empty() && drain(&net, B).is_empty());
    assert_eq!(net.open_ends(), 1, "the other end still believes in it");
}

#[test]
fn a_stall_delays_and_loses_nothing() {
    let mut plan = FaultPlan::calm();
    plan.net.stall = Chance::ALWAYS;
    let fabric = SimFabric::new(2, plan);
    let net = fabric.net();
    let (a, b) = connected(&fabric);
    let before = fabric.now();
    net.send(a, &message(100, 3));
    run(&fabric);
    assert!(fabric.now() >= before + 500_000);
    assert_eq!(collect(&drain(&net, B), b), (message(100, 3), false));
}

#[test]
fn a_cut_link_holds_bytes_back_in_their_order() {
    for seed in 0..30 {
        let fabric = SimFabric::new(seed, FaultPlan::calm());
        let net = fabric.net();
        let (a, b) = connected(&fabric);
        fabric.cut_link(A, B, true);
        for i in 0..20 {
            net.send(a, &[i]);
        }
        let now = fabric.now();
        fabric.advance_to(now + 5_000_000);
        assert!(drain(&net, B).is_empty());
        fabric.cut_link(A, B, false);
        run(&fabric);
        assert_eq!(collect(&drain(&net, B), b), ((0..20).collect(), false));
    }
}

#[test]
fn a_crash_closes_connections_or_leaves_them_silent() {
    let (mut told, mut silent) = (0, 0);
    for seed in 0..40 {
        let fabric = SimFabric::new(seed, FaultPlan::calm());
        let net = fabric.net();
        let (a, b) = connected(&fabric);
        net.send(a, b"unread");
        run(&fabric);
        assert!(!net.peer_has_crashed(a) && !net.peer_has_crashed(b));
        fabric.crash(B);
        assert!(net.peer_has_crashed(a));
        net.send(b, b"from the grave");
        run(&fabric);
        assert!(drain(&net, B).is_empty(), "its inbox died with it");
        match drain(&net, A)[..] {
            [NetEvent::Closed { conn }] if conn == a => told += 1,
            [] => silent += 1,
            ref other => panic!("{other:?}"),
        }
        let again = net.dial(A, B, 7);
        run(&fabric);
        assert!(matches!(drain(&net, A)[..], [] | [NetEvent::Refused { .. }]));
        net.close(again);
        fabric.restart(B);
        let (forth, back) = connected(&fabric);
        assert!(!net.peer_has_crashed(forth) && !net.peer_has_crashed(back));
        net.send(back, b"alive");
        run(&fabric);
        assert_eq!(drain(&net, A).len(), 1);
    }
    assert!(told > 10 && silent > 5, "{told} {silent}");
}

#[test]
fn arrivals_wake_their_node() {
    let fabric = SimFabric::new(2, FaultPlan::calm());
    let net = fabric.net();
    let (a, _) = connected(&fabric);
    assert!(fabric.take_wake(A) && fabric.take_wake(B));
    net.send(a, b"x");
    assert!(!fabric.take_wake(B));
    run(&fabric);
    assert!(fabric.take_wake(B) && !fabric.take_wake(A));
}

#[test]
fn the_trace_sees_contents() {
    let run_with = |bytes: &[u8]| {
        let fabric = SimFabric::new(2, FaultPlan::calm());
        let (a, _) = connected(&fabric);
        fabric.net().send(a, bytes);
        run(&fabric);
        fabric.trace_hash()
    };
    assert_eq!(run_with(b"same"), run_with(b"same"));
    assert_ne!(run_with(b"same"), run_with(b"sane"));
    let fabric = SimFabric::new(2, FaultPlan::calm());
    let before = fabric.trace_hash();
    fabric.note("from outside", &[1]);
    assert_ne!(fabric.trace_hash(), before);
}
