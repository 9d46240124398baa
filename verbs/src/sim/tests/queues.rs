use super::*;
use CompletionStatus::{
    Flushed, LocalLength, ReceiverNotReadyExceeded, RemoteInvalidRequest, Success, TransportRetryExceeded,
};

#[test]
fn one_device_with_what_the_plan_says() {
    let mut plan = plan();
    plan.capabilities.mappable = true;
    plan.capabilities.max_sge = 9;
    let provider = SimFabric::new(1, plan.clone()).provider(NodeId(3));
    let devices = provider.devices().unwrap();
    assert_eq!(devices.len(), 1);
    assert_eq!((devices[0].name.as_str(), devices[0].kind), ("sim0", crate::ProviderKind::Sim));
    assert_eq!(devices[0].capabilities, plan.capabilities);
    assert_eq!(provider.open("sim1").unwrap_err().cause, Cause::NotFound { what: "device" });
    assert!(provider.open("sim0").unwrap().event_fd().is_none());
}

#[test]
fn reads_and_writes_move_exactly_their_bytes() {
    for seed in 0..50 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        let content: Vec<u8> = (0..1000u32).map(|i| (i * 7 + seed as u32) as u8).collect();
        b.region.memory().write(5000, &content).unwrap();
        a.read(1, 77, b.region.remote(5000, 1000).unwrap());
        run(&fabric);
        assert_eq!(statuses(&a.poll()), [(1, Success)]);
        assert_eq!(a.bytes(77, 1000), content);
        assert_eq!((a.bytes(76, 1), a.bytes(1077, 1)), (vec![0], vec![0]));
        a.write(2, 77, b.region.remote(9000, 1000).unwrap());
        run(&fabric);
        let done = a.poll();
        assert_eq!((done[0].id, done[0].status, done[0].bytes, done[0].opcode), (2, Success, 1000, Opcode::Write));
        assert_eq!(b.bytes(9000, 1000), content);
        assert!(b.poll().is_empty(), "one-sided: the peer's queue is told nothing");
    }
}

#[test]
fn scattered_local_memory_keeps_its_order() {
    for seed in 0..30 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        let content: Vec<u8> = (0..60).collect();
        b.region.memory().write(0, &content).unwrap();
        let slice = |offset, len| LocalSlice { region: a.region.clone(), offset, len };
        let local = vec![slice(300, 10), slice(200, 0), slice(100, 20), slice(500, 30)];
        let remote = Some(b.region.remote(0, 60).unwrap());
        a.post(vec![WorkRequest { id: 1, opcode: Opcode::Read, local: local.clone(), remote }]).unwrap();
        run(&fabric);
        assert_eq!([a.bytes(300, 10), a.bytes(100, 20), a.bytes(500, 30)].concat(), content);
        let remote = Some(b.region.remote(1000, 60).unwrap());
        a.post(vec![WorkRequest { id: 2, opcode: Opcode::Write, local, remote }]).unwrap();
        run(&fabric);
        assert_eq!(b.bytes(1000, 60), content);
    }
}

#[test]
fn nothing_happens_before_its_time_or_without_the_clock() {
    let fabric = SimFabric::new(5, plan());
    let (a, b) = pair(&fabric);
    a.read(1, 0, b.region.remote(0, 64).unwrap());
    assert_eq!(a.device.progress(), crate::Progress::Idle);
    assert!(a.poll().is_empty());
    let now = fabric.now();
    fabric.advance_to(now + 1_000); // shorter than the shortest latency
    assert!(a.poll().is_empty());
    fabric.advance_to(now + 1_000_000);
    assert_eq!(a.poll().len(), 1);
    fabric.advance_to(0);
    assert_eq!(fabric.now(), now + 1_000_000, "the clock never goes back");
}

#[test]
fn a_read_sees_memory_at_several_moments() {
    let mut torn = 0;
    for seed in 0..100 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        b.fill(0, 4096, 1);
        a.read(1, 0, b.region.remote(0, 4096).unwrap());
        let mut tick = 1u8;
        while a.poll().is_empty() {
            step(&fabric);
            tick = tick.wrapping_add(1);
            b.fill(0, 4096, tick);
        }
        let seen = a.bytes(0, 4096);
        torn += u32::from(seen.iter().any(|&byte| byte != seen[0]));
    }
    assert!(torn > 30, "only {torn} of 100 reads were torn");
}

#[test]
fn one_queue_pair_completes_in_order_and_two_overtake_each_other() {
    let mut overtaken = false;
    for seed in 0..30 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        let second = a.pd.create_qp(&a.cq, &a.cq, CAPACITY).unwrap();
        let peer = b.pd.create_qp(&b.cq, &b.cq, CAPACITY).unwrap();
        connect(&fabric, &second, &peer);
        let remote = b.region.remote(0, 100).unwrap();
        for id in 0..12 {
            a.read(id, 0, remote);
            let request = request(100 + id, Opcode::Read, &a.region, 200, 100, Some(remote));
            // SAFETY: nobody looks at the bytes.
            unsafe { second.post_send(vec![request]) }.unwrap();
        }
        run(&fabric);
        let ids: Vec<u64> = a.poll().iter().map(|completion| completion.id).collect();
        let of = |low: bool| ids.iter().copied().filter(|id| (*id < 100) == low).collect::<Vec<_>>();
        assert_eq!(of(true), (0..12).collect::<Vec<_>>());
        assert_eq!(of(false), (100..112).collect::<Vec<_>>());
        overtaken |= ids.windows(2).any(|pair| pair[0] >= 100 && pair[1] + 100 < pair[0]);
    }
    assert!(overtaken);
}

#[test]
fn writes_of_one_queue_pair_are_delivered_in_order() {
    for seed in 0..50 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        let remote = b.region.remote(0, 256).unwrap();
        for id in 1..=10u8 {
            a.fill(u64::from(id) * 256, 256, id);
            a.write(u64::from(id), u64::from(id) * 256, remote);
        }
        run(&fabric);
        assert_eq!(a.poll().len(), 10);
        assert_eq!(b.bytes(0, 256), [10; 256]);
    }
}

#[test]
fn a_completed_write_is_delivered_and_its_immediate_comes_after_the_bytes() {
    for seed in 0..50 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        b.receive(9, 60_000, 0);
        a.fill(0, 3000, 8);
        let remote = Some(b.region.remote(100, 3000).unwrap());
        a.post(vec![request(1, Opcode::WriteWithImmediate(77), &a.region, 0, 3000, remote)]).unwrap();
        let mut got = Vec::new();
        while got.is_empty() {
            assert!(step(&fabric));
            got = b.poll();
        }
        assert_eq!(b.bytes(100, 3000), [8; 3000]);
        assert_eq!((got[0].id, got[0].opcode, got[0].immediate, got[0].bytes), (9, Opcode::Receive, Some(77), 3000));
        run(&fabric);
        assert_eq!(statuses(&a.poll()), [(1, Success)]);
    }
}

#[test]
fn sends_meet_receives_in_order() {
    let fabric = SimFabric::new(11, plan());
    let (a, b) = pair(&fabric);
    for id in 0..4 {
        b.receive(id, 1000 * id, 500);
        a.fill(1000 * id, 400, id as u8 + 1);
        a.send(id, 1000 * id, 400);
    }
    run(&fabric);
    let received = b.poll();
    assert_eq!(statuses(&received), [(0, Success), (1, Success), (2, Success), (3, Success)]);
    for (id, completion) in received.iter().enumerate() {
        assert_eq!((completion.immediate, completion.bytes), (Some(id as u32), 400));
        assert_eq!(b.bytes(1000 * id as u64, 401), [vec![id as u8 + 1; 400], vec![0]].concat());
    }
    assert_eq!(statuses(&a.poll()), [(0, Success), (1, Success), (2, Success), (3, Success)]);
}

#[test]
fn a_send_waits_for_a_receive_and_gives_up_in_the_end() {
    let fabric = SimFabric::new(3, plan());
    let (a, b) = pair(&fabric);
    a.send(1, 0, 10);
    run_until(&fabric, || fabric.counts().receiver_not_ready == 2);
    b.receive(5, 0, 10);
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(1, Success)], "posted in time");

    a.send(2, 0, 10);
    a.send(3, 0, 10);
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(2, ReceiverNotReadyExceeded), (3, Flushed)]);
    assert_eq!(a.qp.state(), QueuePairState::Error);
    assert_eq!(a.qp.failure().unwrap().cause, Cause::NotFound { what: "posted receive" });
}

#[test]
fn a_message_longer_than_its_receive_fails_both_ends() {
    let fabric = SimFabric::new(4, plan());
    let (a, b) = pair(&fabric);
    b.receive(1, 0, 10);
    b.receive(2, 100, 10);
    a.fill(0, 11, 9);
    a.send(3, 0, 11);
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(3, RemoteInvalidRequest)]);
    assert_eq!(statuses(&b.poll()), [(1, LocalLength), (2, Flushed)]);
    assert_eq!(b.bytes(0, 11), [0; 11]);
    assert_eq!((a.qp.state(), b.qp.state()), (QueuePairState::Error, QueuePairState::Error));
}

#[test]
fn what_is_posted_before_the_connection_waits_for_it() {
    let fabric = SimFabric::new(6, plan());
    let (a, b) = (end(&fabric, 1, ALL), end(&fabric, 2, ALL));
    let remote = b.region.remote(0, 8).unwrap();
    let early = a.post(vec![request(0, Opcode::Read, &a.region, 0, 8, Some(remote))]).unwrap_err();
    assert!(matches!(early.cause, Cause::State { is: QueuePairState::Reset, .. }));
    a.qp.connect(&b.qp.address(), true).unwrap();
    assert!(a.qp.connect(&b.qp.address(), true).is_err(), "twice");
    a.read(1, 0, remote);
    fabric.advance_to(1_000_000);
    assert!(a.poll().is_empty());
    b.qp.connect(&a.qp.address(), false).unwrap();
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(1, Success)]);
}

#[test]
fn a_connection_needs_two_ends_that_agree() {
    let ends = |fabric: &SimFabric| (end(fabric, 1, ALL), end(fabric, 2, ALL), end(fabric, 3, ALL));
    let fabric = SimFabric::new(7, plan());
    let (a, b, c) = ends(&fabric);
    assert!(matches!(a.qp.connect(b"nonsense", true).unwrap_err().cause, Cause::Malformed { .. }));
    let mut bent = b.qp.address();
    bent[9] ^= 1;
    assert!(matches!(a.qp.connect(&bent, true).unwrap_err().cause, Cause::Malformed { .. }));
    a.qp.connect(&b.qp.address(), true).unwrap();
    b.qp.connect(&c.qp.address(), false).unwrap();
    c.qp.connect(&a.qp.address(), true).unwrap();
    a.read(1, 0, b.region.remote(0, 8).unwrap());
    run(&fabric);
    for end in [&a, &b, &c] {
        assert_eq!(end.qp.state(), QueuePairState::Error);
    }
    assert_eq!(statuses(&a.poll()), [(1, Flushed)]);

    let fabric = SimFabric::new(8, plan());
    let (a, b, _) = ends(&fabric);
    a.qp.connect(&b.qp.address(), true).unwrap();
    b.qp.connect(&a.qp.address(), true).unwrap();
    run(&fabric);
    assert_eq!(a.qp.state(), QueuePairState::Error, "both active");
}

#[test]
fn capacities_hold_until_completions_are_polled() {
    let fabric = SimFabric::new(9, plan());
    let (a, b) = pair(&fabric);
    let remote = b.region.remote(0, 8).unwrap();
    let one = |id| request(id, Opcode::Read, &a.region, 0, 8, Some(remote));
    a.post((0..31).map(one).collect()).unwrap();
    let refused = a.post(vec![one(31), one(32)]).unwrap_err();
    assert_eq!(refused.cause, Cause::Limit { what: "max_send_wr", have: 32, need: 33 });
    assert!(refused.is_transient());
    a.post(vec![one(31)]).unwrap();
    run(&fabric);
    assert!(a.post(vec![one(40)]).is_err(), "done, but not polled");
    assert_eq!(a.poll().len(), 32, "and none of the refused call");
    a.post(vec![one(40)]).unwrap();

    for id in 0..16 {
        b.receive(id, 0, 8);
    }
    // SAFETY: refused.
    let refused = unsafe { b.qp.post_recv(ReceiveRequest { id: 16, local: None }) }.unwrap_err();
    assert!(matches!(refused.cause, Cause::Limit { what: "max_recv_wr", have: 16, need: 17 }));
}

#[test]
fn a_completion_queue_holds_all_queues_attached_to_it() {
    let fabric = SimFabric::new(9, plan());
    let device = fabric.provider(NodeId(1)).open("sim0").unwrap();
    let pd = device.alloc_pd().unwrap();
    assert!(device.create_cq(0).is_err());
    let cq = device.create_cq(100).unwrap();
    let first = pd.create_qp(&cq, &cq, CAPACITY).unwrap();
    let _second = pd.create_qp(&cq, &cq, CAPACITY).unwrap();
    let refused = pd.create_qp(&cq, &cq, CAPACITY).unwrap_err();
    assert!(matches!(refused.cause, Cause::Limit { have: 100, need: 144, .. }));
    drop(first);
    let _third = pd.create_qp(&cq, &cq, CAPACITY).unwrap();
    let too_many = QueuePairCapacity { max_send_wr: 65, max_recv_wr: 1 };
    assert!(pd.create_qp(&cq, &cq, too_many).is_err());
    let elsewhere = fabric.provider(NodeId(2)).open("sim0").unwrap().create_cq(100).unwrap();
    assert!(matches!(pd.create_qp(&elsewhere, &elsewhere, CAPACITY).unwrap_err().cause, Cause::Denied { .. }));
}

#[test]
fn malformed_requests_are_refused_whole() {
    let fabric = SimFabric::new(10, plan());
    let (a, b) = pair(&fabric);
    let remote = |len| Some(b.region.remote(0, len).unwrap());
    let one = |opcode, offset, len, remote| request(1, opcode, &a.region, offset, len, remote);
    let good = one(Opcode::Read, 0, 8, remote(8));
    for bad in [
        one(Opcode::Read, 0, 8, remote(9)),
        one(Opcode::Write, 0, 8, None),
        one(Opcode::Receive, 0, 8, None),
        one(Opcode::Read, 65_530, 8, remote(8)),
        one(Opcode::Read, u64::MAX, 8, remote(8)),
        WorkRequest { local: vec![good.local[0].clone(); 5], remote: remote(40), ..good.clone() },
        request(1, Opcode::Read, &b.region, 0, 8, remote(8)),
    ] {
        a.post(vec![good.clone(), bad]).unwrap_err();
    }
    let readonly = a.pd.register(Memory::shared(4096, Default::default()).unwrap(), Access::REMOTE_READ).unwrap();
    let denied = a.post(vec![request(1, Opcode::Read, &readonly, 0, 8, remote(8))]).unwrap_err();
    assert!(matches!(denied.cause, Cause::Denied { .. }));
    a.post(vec![request(2, Opcode::Write, &readonly, 0, 8, remote(8))]).unwrap();
    a.post(Vec::new()).unwrap();
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(2, Success)]);
}

#[test]
fn requests_of_zero_bytes_complete() {
    let fabric = SimFabric::new(12, plan());
    let (a, b) = pair(&fabric);
    let nowhere = Some(RemoteSlice { address: 1, len: 0, rkey: 2 });
    for opcode in [Opcode::Read, Opcode::Write] {
        a.post(vec![WorkRequest { id: 1, opcode, local: Vec::new(), remote: nowhere }]).unwrap();
    }
    // SAFETY: takes no memory.
    unsafe { b.qp.post_recv(ReceiveRequest { id: 4, local: None }) }.unwrap();
    a.post(vec![WorkRequest { id: 3, opcode: Opcode::Send, local: Vec::new(), remote: None }]).unwrap();
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(1, Success), (1, Success), (3, Success)]);
    assert_eq!(statuses(&b.poll()), [(4, Success)]);
}

#[test]
fn the_error_state_flushes_each_request_once() {
    for seed in 0..100 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        let remote = b.region.remote(0, 512).unwrap();
        for id in 0..20 {
            a.read(id, id * 512, remote);
        }
        a.receive(100, 60_000, 8);
        let until = fabric.now() + 1_000 * seed;
        fabric.advance_to(until);
        a.qp.to_error();
        a.qp.to_error();
        assert!(a.post(vec![request(1, Opcode::Read, &a.region, 0, 512, Some(remote))]).is_err());
        run(&fabric);
        let done = a.poll();
        let sends: Vec<_> = done.iter().filter(|c| c.opcode == Opcode::Read).collect();
        assert_eq!(sends.iter().map(|c| c.id).collect::<Vec<_>>(), (0..20).collect::<Vec<_>>());
        let first_flushed = sends.iter().position(|c| c.status == Flushed).unwrap_or(20);
        assert!(sends[first_flushed..].iter().all(|c| c.status == Flushed && c.bytes == 0));
        assert_eq!(done.iter().filter(|c| c.id == 100 && c.status == Flushed).count(), 1);
        assert_eq!(done.len(), 21);
    }
}

#[test]
fn memory_changes_until_the_flushed_completion_and_not_after() {
    let mut late = 0;
    for seed in 0..200 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        b.fill(0, 4096, 7);
        a.read(1, 0, b.region.remote(0, 4096).unwrap());
        let until = fabric.now() + 200 * seed;
        fabric.advance_to(until);
        a.qp.to_error();
        let at_error = a.bytes(0, 4096);
        let mut done = Vec::new();
        while done.is_empty() {
            assert!(step(&fabric));
            done = a.poll();
        }
        late += u32::from(a.bytes(0, 4096) != at_error);
        if done[0].status == Flushed {
            a.fill(0, 4096, 99);
            run(&fabric);
            assert_eq!(a.bytes(0, 4096), [99; 4096], "touched after the fence (I3), seed {seed}");
        }
    }
    assert!(late > 5, "the device touched memory in the error state only {late} times");
}

#[test]
fn a_write_that_has_left_arrives_after_its_requester_failed() {
    let (mut delivered_late, mut partial) = (0, 0);
    for seed in 0..200 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        a.fill(0, 4096, 5);
        a.write(1, 0, b.region.remote(0, 4096).unwrap());
        let until = fabric.now() + 20 * seed;
        fabric.advance_to(until);
        a.qp.to_error();
        let mut flushed = false;
        let (mut at_flush, mut after) = (vec![], vec![]);
        while step(&fabric) {
            if a.poll().iter().any(|completion| completion.status == Flushed) {
                flushed = true;
                at_flush = b.bytes(0, 4096);
                a.fill(0, 4096, 6); // ours again: must not travel any more
            }
            after = b.bytes(0, 4096);
        }
        assert!(after.iter().all(|&byte| byte == 0 || byte == 5), "seed {seed}: memory read after its fence");
        delivered_late += u32::from(flushed && at_flush != after);
        partial += u32::from(after.contains(&0) && after.contains(&5));
    }
    assert!(delivered_late > 10 && partial > 5, "{delivered_late} late, {partial} partial");
}

#[test]
fn the_responders_own_fence_holds() {
    let mut changed_in_error = 0;
    for seed in 0..200 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        a.fill(0, 4096, 5);
        for id in 0..8 {
            a.write(id, 0, b.region.remote(4096 * id, 4096).unwrap());
        }
        let until = fabric.now() + 200 * seed;
        fabric.advance_to(until);
        if seed % 2 == 0 {
            b.qp.to_error();
            assert!(!b.qp.is_fenced());
            let at_error = b.bytes(0, 65_536);
            run_until(&fabric, || b.qp.is_fenced());
            changed_in_error += u32::from(b.bytes(0, 65_536) != at_error);
        } else {
            drop(b.qp);
        }
        b.region.memory().write(0, &[9; 65_536]).unwrap();
        run(&fabric);
        assert!(b.region.memory().address() as usize != 0);
        let mut now = vec![0; 65_536];
        b.region.memory().read(0, &mut now).unwrap();
        assert!(now.iter().all(|&byte| byte == 9), "seed {seed}: written after the fence (I3)");
        assert_eq!(a.poll().len(), 8);
    }
    assert!(changed_in_error > 10, "{changed_in_error}");
}

#[test]
fn a_destroyed_queue_pair_leaves_what_completed_and_no_more() {
    for seed in 0..60 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        b.fill(0, 100, 3);
        for id in 0..10 {
            a.read(id, id * 100, b.region.remote(0, 100).unwrap());
        }
        let until = fabric.now() + 1_500 * seed;
        fabric.advance_to(until);
        let End { qp, cq, region, .. } = a;
        drop(qp);
        region.memory().write(0, &[1; 1000]).unwrap();
        let done = {
            let mut out = Vec::new();
            cq.poll(&mut out, usize::MAX);
            out
        };
        assert!(done.iter().enumerate().all(|(i, c)| (c.id, c.status) == (i as u64, Success)));
        run(&fabric);
        assert_eq!(cq.poll(&mut Vec::new(), usize::MAX), 0);
        let mut bytes = [0; 1000];
        region.memory().read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [1; 1000], "destruction is a fence");
    }
}

#[test]
fn a_lost_connection_ends_everything_at_both_ends() {
    let mut silent = 0;
    for seed in 0..40 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        for id in 0..5 {
            a.read(id, 0, b.region.remote(0, 100).unwrap());
        }
        let until = fabric.now() + 700 * seed;
        fabric.advance_to(until);
        fabric.lose_connection(a.qp.number());
        run(&fabric);
        let done = a.poll();
        assert_eq!(done.len(), 5);
        let failed: Vec<_> = done.iter().filter(|c| c.status != Success).map(|c| c.status).collect();
        assert!(failed.iter().skip(1).all(|&status| status == Flushed));
        assert!(failed.first().is_none_or(|&status| status == TransportRetryExceeded || status == Flushed));
        assert_eq!(a.qp.failure().unwrap().cause, Cause::Disconnected);
        if b.qp.state() == QueuePairState::ReadyToSend {
            silent += 1; // told by nobody: its next request finds out
            b.read(9, 0, a.region.remote(0, 100).unwrap());
            run(&fabric);
            assert_eq!(statuses(&b.poll()), [(9, TransportRetryExceeded)]);
        }
        assert_eq!(b.qp.state(), QueuePairState::Error);
    }
    assert!((5..35).contains(&silent));
}

#[test]
fn a_crashed_node_changes_no_more_and_its_peers_find_out() {
    for seed in 0..60 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        a.fill(0, 1000, 2);
        for id in 0..6 {
            a.write(id, 0, b.region.remote(id * 1000, 1000).unwrap());
            a.read(10 + id, 10_000 + 1000 * id, b.region.remote(0, 1000).unwrap());
        }
        b.read(1, 0, a.region.remote(0, 1000).unwrap());
        let until = fabric.now() + 1_000 * seed;
        fabric.advance_to(until);
        let completed = b.poll().len();
        fabric.crash(NodeId(2));
        let frozen = b.bytes(0, 65_536);
        run(&fabric);
        assert_eq!(b.bytes(0, 65_536), frozen);
        assert!(b.poll().is_empty() && completed <= 1);
        assert!(b.qp.is_fenced());
        assert_eq!(a.poll().len(), 12, "each request has its end");
        assert!(b.device.alloc_pd().is_err());
        assert!(fabric.provider(NodeId(2)).open("sim0").is_err());
        fabric.restart(NodeId(2));
        assert!(b.device.alloc_pd().is_err(), "a handle of the old life stays dead");
        let (again, other) = (end(&fabric, 2, ALL), end(&fabric, 1, ALL));
        connect(&fabric, &other.qp, &again.qp);
        other.read(1, 0, again.region.remote(0, 8).unwrap());
        run(&fabric);
        assert_eq!(statuses(&other.poll()), [(1, Success)]);
    }
}

#[test]
fn a_cut_link_delays_and_then_fails() {
    let fabric = SimFabric::new(2, plan());
    let (a, b) = pair(&fabric);
    b.fill(0, 100, 4);
    fabric.cut_link(NodeId(2), NodeId(1), true);
    a.read(1, 0, b.region.remote(0, 100).unwrap());
    let now = fabric.now();
    fabric.advance_to(now + 1_000_000);
    assert!(a.poll().is_empty());
    fabric.cut_link(NodeId(1), NodeId(2), false);
    run(&fabric);
    assert_eq!((statuses(&a.poll()), a.bytes(0, 100)), (vec![(1, Success)], vec![4; 100]));
    fabric.cut_link(NodeId(1), NodeId(2), true);
    a.write(2, 0, b.region.remote(100, 100).unwrap());
    a.write(3, 0, b.region.remote(200, 100).unwrap());
    let now = fabric.now();
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(2, TransportRetryExceeded), (3, Flushed)]);
    assert!(fabric.now() >= now + plan().retry_timeout);
    assert_eq!(b.bytes(100, 200), [0; 200]);
}

#[test]
fn an_answer_lost_on_a_cut_link_fails_a_write_that_was_delivered() {
    let mut seen = 0;
    for seed in 0..40 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        a.fill(0, 10, 1);
        a.write(1, 0, b.region.remote(0, 10).unwrap());
        run_until(&fabric, || b.bytes(0, 10) == [1; 10]);
        fabric.cut_link(NodeId(1), NodeId(2), true);
        run(&fabric);
        let done = a.poll();
        assert_eq!(done.len(), 1);
        seen += u32::from(done[0].status == TransportRetryExceeded);
    }
    assert!(seen > 20, "{seen}");
}

#[test]
fn late_completions_come_late() {
    let mut plan = plan();
    plan.late = Chance::ALWAYS;
    let fabric = SimFabric::new(2, plan);
    let (a, b) = pair(&fabric);
    let before = fabric.now();
    a.read(1, 0, b.region.remote(0, 100).unwrap());
    run(&fabric);
    assert!(fabric.now() > before + 100_000);
    assert_eq!(a.poll().len(), 1);
}

#[test]
fn an_armed_queue_and_a_change_of_state_wake_their_node() {
    let fabric = SimFabric::new(13, plan());
    let (a, b) = pair(&fabric);
    assert!(fabric.take_wake(NodeId(1)) && fabric.take_wake(NodeId(2)), "they became ready");
    a.read(1, 0, b.region.remote(0, 8).unwrap());
    run(&fabric);
    assert!(!fabric.take_wake(NodeId(1)), "not armed");
    a.cq.arm();
    assert!(!fabric.take_wake(NodeId(1)), "what came before arming does not count");
    a.read(2, 0, b.region.remote(0, 8).unwrap());
    a.read(3, 0, b.region.remote(0, 8).unwrap());
    run(&fabric);
    assert!(fabric.take_wake(NodeId(1)) && !fabric.take_wake(NodeId(1)));
    a.read(4, 0, b.region.remote(0, 8).unwrap());
    run(&fabric);
    assert!(!fabric.take_wake(NodeId(1)), "one event an arming");
    b.qp.to_error();
    assert!(fabric.take_wake(NodeId(2)));
}

/// A busy minute with every kind of request and fault, ending in the trace.
fn storm(seed: u64) -> (u64, Counts) {
    let mut plan = FaultPlan::stormy();
    plan.lose_connection = Chance(20_000);
    let fabric = SimFabric::new(seed, plan);
    let mut random = Random::new(seed ^ 0xABCD);
    let (a, b) = (end(&fabric, 1, ALL), end(&fabric, 2, ALL));
    a.qp.connect(&b.qp.address(), true).unwrap();
    b.qp.connect(&a.qp.address(), false).unwrap();
    for id in 0..200 {
        let (near, far) = if random.below(2) == 0 { (&a, &b) } else { (&b, &a) };
        let (offset, len) = (random.below(30_000), random.below(3000));
        let remote = Some(far.region.remote(30_000 + random.below(2000), len).unwrap());
        let opcode = match random.below(5) {
            0 => Opcode::Read,
            1 => Opcode::Write,
            2 => Opcode::WriteWithImmediate(id as u32),
            _ => Opcode::Send,
        };
        let _ = near.post(vec![request(id, opcode, &near.region, offset, len, remote)]);
        if random.below(3) > 0 {
            let local = Some(LocalSlice { region: far.region.clone(), offset: 50_000, len: 3000 });
            // SAFETY: nobody looks at the bytes.
            let _ = unsafe { far.qp.post_recv(ReceiveRequest { id, local }) };
        }
        let until = fabric.now() + random.below(20_000);
        fabric.advance_to(until);
        near.poll();
    }
    run(&fabric);
    (fabric.trace_hash(), fabric.counts())
}

#[test]
fn one_seed_gives_one_trace() {
    let mut hashes = std::collections::BTreeSet::new();
    let mut total = Counts::default();
    for seed in 0..60 {
        let (hash, counts) = storm(seed);
        assert_eq!(storm(seed), (hash, counts), "seed {seed}");
        hashes.insert(hash);
        total.succeeded += counts.succeeded;
        total.lost_connections += counts.lost_connections;
        total.receiver_not_ready += counts.receiver_not_ready;
    }
    assert_eq!(hashes.len(), 60);
    assert!(total.succeeded > 1000 && total.lost_connections > 10 && total.receiver_not_ready > 10, "{total:?}");
}

#[test]
fn what_is_posted_keeps_no_fabric_alive() {
    let fabric = SimFabric::new(1, plan());
    let weak = std::sync::Arc::downgrade(&fabric.0);
    let (a, b) = pair(&fabric);
    a.read(1, 0, b.region.remote(0, 8).unwrap());
    drop((a, b, fabric));
    assert!(weak.upgrade().is_none());
}

#[test]
fn capabilities_of_the_plan_bind_messages() {
    let mut plan = plan();
    plan.capabilities = Capabilities::new(100, 8);
    let fabric = SimFabric::new(1, plan);
    let device = fabric.provider(NodeId(1)).open("sim0").unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(16).unwrap();
    let qp = pd.create_qp(&cq, &cq, QueuePairCapacity { max_send_wr: 8, max_recv_wr: 8 }).unwrap();
    qp.connect(&qp.address(), true).unwrap();
    let region = pd.register(Memory::shared(4096, Default::default()).unwrap(), ALL).unwrap();
    let remote = Some(region.remote(0, 101).unwrap());
    // SAFETY: refused.
    let refused = unsafe { qp.post_send(vec![request(1, Opcode::Write, &region, 0, 101, remote)]) }.unwrap_err();
    assert_eq!(refused.cause, Cause::Limit { what: "max_message_size", have: 100, need: 101 });
}
