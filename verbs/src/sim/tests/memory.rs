use super::*;
use CompletionStatus::{Flushed, RemoteAccess, Success};

#[test]
fn access_is_checked_by_the_owner() {
    let good = |end: &End| end.region.remote(1000, 100).unwrap();
    type Bend = fn(RemoteSlice) -> RemoteSlice;
    let bends: [(Bend, Access); 6] = [
        (|r| RemoteSlice { rkey: r.rkey ^ 1, ..r }, ALL),
        (|r| RemoteSlice { address: r.address - 1001, ..r }, ALL),
        (|r| RemoteSlice { address: r.address + 64 * 1024 - 1099, ..r }, ALL),
        (|r| RemoteSlice { address: u64::MAX - 10, ..r }, ALL),
        (|r| r, Access::LOCAL_WRITE | Access::REMOTE_WRITE),
        (|r| r, Access::empty()),
    ];
    for (i, (bend, access)) in bends.into_iter().enumerate() {
        for seed in 0..10 {
            let fabric = SimFabric::new(seed, plan());
            let (a, b) = (end(&fabric, 1, ALL), end(&fabric, 2, access));
            connect(&fabric, &a.qp, &b.qp);
            b.fill(0, 65_536, 3);
            a.read(1, 0, bend(good(&b)));
            a.read(2, 0, good(&b));
            run(&fabric);
            assert_eq!(statuses(&a.poll()), [(1, RemoteAccess), (2, Flushed)], "case {i} seed {seed}");
            assert_eq!(a.bytes(0, 100), [0; 100]);
            assert!(matches!(a.qp.failure().unwrap().cause, Cause::Denied { .. }));
            assert_eq!(fabric.counts().refused, 1);
        }
    }
}

#[test]
fn writing_needs_its_own_right() {
    let fabric = SimFabric::new(1, plan());
    let (a, b) = (end(&fabric, 1, ALL), end(&fabric, 2, Access::LOCAL_WRITE | Access::REMOTE_READ));
    connect(&fabric, &a.qp, &b.qp);
    a.fill(0, 10, 1);
    a.read(1, 0, b.region.remote(0, 10).unwrap());
    a.write(2, 0, b.region.remote(0, 10).unwrap());
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(1, Success), (2, RemoteAccess)]);
    assert_eq!(b.bytes(0, 10), [0; 10]);
}

#[test]
fn a_region_of_another_domain_is_out_of_reach() {
    let fabric = SimFabric::new(1, plan());
    let (a, b) = pair(&fabric);
    let stranger = end(&fabric, 2, ALL);
    a.read(1, 0, stranger.region.remote(0, 10).unwrap());
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(1, RemoteAccess)]);
    drop(b);
}

#[test]
fn a_deregistered_region_is_out_of_reach_and_a_posted_request_keeps_one() {
    let fabric = SimFabric::new(1, plan());
    let (a, b) = pair(&fabric);
    let memory = Memory::shared(4096, Default::default()).unwrap();
    let region = b.pd.register(memory.clone(), ALL).unwrap();
    let remote = region.remote(0, 10).unwrap();
    // Posted by its owner: stays registered until that request is done.
    b.post(vec![request(5, Opcode::Read, &region, 0, 10, Some(a.region.remote(0, 10).unwrap()))]).unwrap();
    drop(region);
    a.fill(0, 10, 7);
    run(&fabric);
    assert_eq!(statuses(&b.poll()), [(5, Success)]);
    a.read(1, 0, remote);
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(1, RemoteAccess)]);
    let mut bytes = [0; 10];
    memory.read(0, &mut bytes).unwrap();
    assert!(bytes == [7; 10] || bytes == [0; 10]);
}

#[test]
fn a_window_opens_its_bytes_to_its_peer_until_it_is_invalidated() {
    let fabric = SimFabric::new(3, plan());
    let (a, b) = (end(&fabric, 1, ALL), end(&fabric, 2, Access::MW_BIND));
    connect(&fabric, &a.qp, &b.qp);
    b.fill(100, 50, 6);
    let window = b.region.bind(&b.qp, 100, 50).unwrap();
    a.read(1, 0, window.remote());
    run(&fabric);
    assert_eq!((statuses(&a.poll()), a.bytes(0, 50)), (vec![(1, Success)], vec![6; 50]));
    assert!(window.invalidate() && window.invalidate());
    a.read(2, 0, window.remote());
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(2, RemoteAccess)]);
}

#[test]
fn a_window_opens_nothing_before_it_is_bound() {
    let mut slow = plan();
    slow.bind = Span(100_000, 200_000);
    let fabric = SimFabric::new(3, slow);
    let (a, b) = (end(&fabric, 1, ALL), end(&fabric, 2, Access::MW_BIND));
    connect(&fabric, &a.qp, &b.qp);
    let window = b.region.bind(&b.qp, 100, 50).unwrap();
    assert!(!window.is_bound());
    fabric.advance_to(fabric.now() + 250_000);
    assert!(window.is_bound());
    a.read(1, 0, window.remote());
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(1, Success)]);
    let early = b.region.bind(&b.qp, 100, 50).unwrap();
    a.read(2, 0, early.remote());
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(2, RemoteAccess)]);
    assert!(early.invalidate() && !early.is_bound());
}

#[test]
fn a_window_opens_nothing_else() {
    for seed in 0..20 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = (end(&fabric, 1, ALL), end(&fabric, 2, Access::MW_BIND));
        connect(&fabric, &a.qp, &b.qp);
        let other = b.pd.create_qp(&b.cq, &b.cq, CAPACITY).unwrap();
        let window = b.region.bind(&b.qp, 100, 50).unwrap();
        let foreign = b.region.bind(&other, 100, 50).unwrap();
        let inside = window.remote();
        let bad = match seed % 4 {
            0 => RemoteSlice { address: inside.address - 1, ..inside },
            1 => RemoteSlice { len: 51, ..inside },
            2 => foreign.remote(),
            _ => b.region.remote(100, 50).unwrap(),
        };
        a.read(1, 0, bad);
        run(&fabric);
        assert_eq!(statuses(&a.poll()), [(1, RemoteAccess)], "seed {seed}");
    }
}

#[test]
fn a_window_is_for_reads() {
    let fabric = SimFabric::new(3, plan());
    let (a, b) = pair(&fabric);
    let window = b.region.bind(&b.qp, 100, 50).unwrap();
    a.write(1, 0, window.remote());
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(1, RemoteAccess)]);
}

#[test]
fn binding_is_refused_where_it_cannot_be() {
    let fabric = SimFabric::new(3, plan());
    let (a, b) = (end(&fabric, 1, Access::LOCAL_WRITE), end(&fabric, 2, ALL));
    assert!(matches!(a.region.bind(&a.qp, 0, 8).unwrap_err().cause, Cause::Denied { .. }));
    assert!(matches!(b.region.bind(&a.qp, 0, 8).unwrap_err().cause, Cause::Denied { .. }));
    assert!(matches!(b.region.bind(&b.qp, 65_535, 2).unwrap_err().cause, Cause::OutOfRange { .. }));
    b.qp.to_error();
    assert!(matches!(b.region.bind(&b.qp, 0, 8).unwrap_err().cause, Cause::State { .. }));

    let mut unkind = plan();
    unkind.bind_fails = Chance::ALWAYS;
    let fabric = SimFabric::new(3, unkind);
    let b = end(&fabric, 2, ALL);
    assert!(b.region.bind(&b.qp, 0, 8).unwrap_err().is_transient());

    let fabric = SimFabric::new(3, FaultPlan::calm());
    let b = end(&fabric, 2, ALL);
    assert!(matches!(b.region.bind(&b.qp, 0, 8).unwrap_err().cause, Cause::Unsupported { .. }));
}

#[test]
fn invalidating_under_an_access_is_a_fence_only_when_it_is_out() {
    let (mut under_way, mut stopped, mut finished) = (0, 0, 0);
    for seed in 0..300 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        b.fill(0, 4096, 1);
        let window = b.region.bind(&b.qp, 0, 4096).unwrap();
        a.read(1, 0, window.remote());
        let until = fabric.now() + 100 * seed;
        fabric.advance_to(until);
        if !window.invalidate() {
            under_way += 1;
            while !window.invalidate() {
                assert!(step(&fabric));
            }
        }
        b.fill(0, 4096, 2); // ours alone now
        run(&fabric);
        let done = a.poll();
        match done[0].status {
            Success => {
                assert_eq!(a.bytes(0, 4096), [1; 4096], "seed {seed}: read after the fence (I3)");
                finished += 1;
            }
            RemoteAccess => {
                assert!(!a.bytes(0, 4096).contains(&2), "seed {seed}");
                stopped += 1;
            }
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    assert!(under_way > 10 && stopped > 10 && finished > 10, "{under_way} {stopped} {finished}");
}

#[test]
fn a_dropped_window_opens_nothing() {
    let fabric = SimFabric::new(3, plan());
    let (a, b) = pair(&fabric);
    let remote = b.region.bind(&b.qp, 0, 10).unwrap().remote();
    a.read(1, 0, remote);
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(1, RemoteAccess)]);
}

#[test]
fn a_view_reads_the_owners_memory_as_it_is() {
    let mut mappable = plan();
    mappable.capabilities.mappable = true;
    let fabric = SimFabric::new(3, mappable);
    let (a, b) = (end(&fabric, 1, ALL), end(&fabric, 2, Access::REMOTE_READ));
    let remote = b.region.remote(100, 50).unwrap();
    assert!(matches!(a.qp.map(remote).unwrap_err().cause, Cause::State { .. }), "not connected yet");
    connect(&fabric, &a.qp, &b.qp);
    let view = a.qp.map(remote).unwrap();
    assert_eq!(view.len(), 50);
    let mut bytes = [0; 4];
    for value in [1, 2] {
        b.fill(100, 50, value);
        view.read(46, &mut bytes).unwrap();
        assert_eq!(bytes, [value; 4]);
    }
    assert!(matches!(view.read(47, &mut bytes).unwrap_err().cause, Cause::OutOfRange { .. }));
    assert_eq!(view.as_ptr(), b.region.memory().address().wrapping_add(100).cast_const());
    let unknown = RemoteSlice { rkey: remote.rkey ^ 1, ..remote };
    assert!(matches!(a.qp.map(unknown).unwrap_err().cause, Cause::NotFound { .. }));
    let outside = RemoteSlice { len: 65_536, ..remote };
    assert!(matches!(a.qp.map(outside).unwrap_err().cause, Cause::OutOfRange { .. }));
    fabric.crash(NodeId(2));
    view.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [2; 4], "the mapping outlives its owner");

    let fabric = SimFabric::new(3, plan());
    let (a, b) = pair(&fabric);
    assert!(matches!(a.qp.map(b.region.remote(0, 1).unwrap()).unwrap_err().cause, Cause::Unsupported { .. }));
}

#[test]
fn ordinary_memory_of_the_callers_works_too() {
    let fabric = SimFabric::new(3, plan());
    let (a, b) = pair(&fabric);
    let mut bytes = vec![0u8; 256];
    // SAFETY: `bytes` outlives the region and everything posted on it, and is not touched until the read is done.
    let memory = unsafe { Memory::borrowed(bytes.as_mut_ptr(), bytes.len()) };
    let region = a.pd.register(memory, Access::LOCAL_WRITE).unwrap();
    b.fill(0, 256, 8);
    a.post(vec![request(1, Opcode::Read, &region, 0, 256, Some(b.region.remote(0, 256).unwrap()))]).unwrap();
    run(&fabric);
    assert_eq!(statuses(&a.poll()), [(1, Success)]);
    drop((region, a, b, fabric));
    assert_eq!(bytes, [8; 256]);
}

#[test]
fn the_memory_under_devices_is_told_until_the_completion() {
    let (mut read, mut written) = (false, false);
    for seed in 0..50 {
        let fabric = SimFabric::new(seed, plan());
        let (a, b) = pair(&fabric);
        let at = |end: &End, offset: usize| end.region.memory().address().addr() + offset;
        a.read(1, 100, b.region.remote(1000, 50).unwrap());
        a.write(2, 5000, b.region.remote(2000, 60).unwrap());
        a.receive(3, 300, 30);
        assert_eq!(fabric.written_by_devices(NodeId(1)), [(at(&a, 100), 50), (at(&a, 300), 30)]);
        while step(&fabric) {
            let reads = fabric.read_by_peers(NodeId(2));
            let writes = fabric.written_by_devices(NodeId(2));
            assert!(reads.iter().all(|range| *range == (at(&b, 1000), 50)));
            assert!(writes.iter().all(|range| *range == (at(&b, 2000), 60)));
            read |= !reads.is_empty();
            written |= !writes.is_empty();
            if fabric.has_completions(NodeId(1)) {
                assert_eq!(fabric.written_by_devices(NodeId(1)), [(at(&a, 300), 30)]);
            }
        }
        assert_eq!(a.poll().len(), 2);
        assert!(!fabric.has_completions(NodeId(1)));
        assert!(fabric.read_by_peers(NodeId(2)).is_empty() && fabric.written_by_devices(NodeId(2)).is_empty());
        a.qp.to_error();
        run(&fabric);
        assert!(fabric.written_by_devices(NodeId(1)).is_empty());
    }
    assert!(read && written, "some request was seen in the peer's memory between two events");
}

#[test]
fn a_device_that_breaks_its_word_does_so() {
    let (mut early, mut late) = (0, 0);
    for seed in 0..100 {
        let mut broken = plan();
        broken.sabotage = Some(Sabotage::EarlyFence);
        let fabric = SimFabric::new(seed, broken.clone());
        let (a, b) = pair(&fabric);
        let window = b.region.bind(&b.qp, 0, 4096).unwrap();
        a.read(1, 0, window.remote());
        let until = fabric.now() + 200 * seed;
        fabric.advance_to(until);
        assert!(window.invalidate());
        early += fabric.read_by_peers(NodeId(2)).len();
        b.qp.to_error();
        assert!(b.qp.is_fenced());

        broken.sabotage = Some(Sabotage::LateLanding);
        let fabric = SimFabric::new(seed, broken);
        let (a, b) = pair(&fabric);
        b.fill(0, 4096, 1);
        a.read(1, 0, b.region.remote(0, 4096).unwrap());
        let until = fabric.now() + 200 * seed;
        fabric.advance_to(until);
        a.qp.to_error();
        run_until(&fabric, || fabric.has_completions(NodeId(1)));
        let flushed = a.poll()[0].status == Flushed;
        a.fill(0, 4096, 2);
        run(&fabric);
        late += u32::from(flushed && a.bytes(0, 4096).contains(&1));
    }
    assert!(early > 5 && late > 5, "{early} early, {late} late");
}

#[test]
fn a_copy_out_of_a_mapping_ends_with_its_requester_alone() {
    let (mut after_fence, mut flushed) = (0, 0);
    for seed in 0..100 {
        let mut mapped = plan();
        mapped.capabilities.mappable = true;
        mapped.capabilities.reads_by_cpu = true;
        let fabric = SimFabric::new(seed, mapped);
        let (a, b) = pair(&fabric);
        b.fill(0, 4096, 1);
        for id in 0..4 {
            a.read(id, id * 4096, b.region.remote(0, 4096).unwrap());
        }
        let until = fabric.now() + 30 * seed;
        fabric.advance_to(until);
        match seed % 3 {
            0 => fabric.crash(NodeId(2)),
            1 => b.qp.to_error(),
            _ => a.qp.to_error(),
        }
        while step(&fabric) {
            let reads = fabric.read_by_peers(NodeId(2)).len();
            after_fence += u32::from(reads > 0 && b.qp.is_fenced() && seed % 3 != 2);
        }
        let done = a.poll();
        assert_eq!(done.len(), 4, "seed {seed}");
        flushed += done.iter().filter(|completion| completion.status == Flushed).count();
        assert!(fabric.read_by_peers(NodeId(2)).is_empty());
    }
    assert!(after_fence > 5 && flushed > 20, "{after_fence} {flushed}");
}
