//! Regions: larger than the device takes in one, with the rights that were asked for and no others.

use super::fake::{provider, provider_without, world};
use super::{All, CAPACITY};
use crate::memory::HugePages;
use crate::{
    Access, Cause, LocalSlice, Memory, MemoryRegion, Opcode, Provider, ReceiveRequest, RemoteSlice, Result, WorkRequest,
};
use rdma_core_sys::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_MW_BIND, IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_REMOTE_READ};

/// Bytes that the device takes in one region; pieces are as many whole pages as they hold.
const MOST: u64 = (64 << 10) + 100;
const PIECE: u64 = 64 << 10;
/// Three pieces, the last of one page.
const LEN: u64 = 2 * PIECE + 4096;

const ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_READ).union(Access::MW_BIND);

/// All objects, and a region in pieces. What is noted of regions is of this one alone.
fn in_pieces() -> (All, MemoryRegion) {
    world(|world| (world.max_mr_size, world.windows) = (MOST, true));
    let all = All::over(&provider()).unwrap();
    world(|world| world.registered.clear());
    let region = all.pd.register(Memory::shared(LEN, HugePages::Off).unwrap(), ACCESS).unwrap();
    (all, region)
}

#[allow(unsafe_code)]
fn post(all: &All, local: Vec<LocalSlice>, remote: RemoteSlice) -> Result<()> {
    // SAFETY: the fakes touch no memory.
    unsafe { all.qp.post_send(vec![WorkRequest { id: 1, opcode: Opcode::Read, local, remote: Some(remote) }]) }
}

fn at(region: &MemoryRegion, offset: u64, len: u64) -> LocalSlice {
    LocalSlice { region: region.clone(), offset, len }
}

/// A remote slice of so many bytes.
fn anywhere(len: u64) -> RemoteSlice {
    RemoteSlice { address: 1 << 40, len, rkey: 7 }
}

// B8: never cut silently; what is advertised is registered.
#[test]
fn what_is_too_large_for_one_region_is_registered_in_pieces_without_a_gap() {
    let (_all, region) = in_pieces();
    let base = region.memory().address().addr();
    let expected: Vec<_> = [(0, PIECE), (PIECE, PIECE), (2 * PIECE, 4096)]
        .map(|(offset, len)| ("reg_mr", base + offset as usize, len as usize))
        .into();
    let made: Vec<_> = world(|world| world.registered.iter().map(|made| (made.0, made.1, made.2)).collect());
    assert_eq!(made, expected);
    assert_eq!((region.len(), region.piece_len()), (LEN, PIECE));
    let all = region.remote_pieces(0, LEN).unwrap();
    let place = |slice: &RemoteSlice| (slice.address - base as u64, slice.len);
    assert_eq!(all.iter().map(place).collect::<Vec<_>>(), [(0, PIECE), (PIECE, PIECE), (2 * PIECE, 4096)]);
    assert!(all[0].rkey != all[1].rkey && all[1].rkey != all[2].rkey, "each its own key");
    assert_eq!(region.remote_pieces(PIECE - 1, 2).unwrap().len(), 2);
    assert_eq!(region.remote_pieces(LEN, 0).unwrap(), []);
}

#[test]
fn a_remote_slice_has_the_key_of_its_piece_or_is_refused() {
    let (_all, region) = in_pieces();
    let keys: Vec<_> = region.remote_pieces(0, LEN).unwrap().iter().map(|slice| slice.rkey).collect();
    for (offset, len, piece) in
        [(0, PIECE, 0), (PIECE - 1, 1, 0), (PIECE, 1, 1), (2 * PIECE - 1, 1, 1), (2 * PIECE, 4096, 2), (LEN, 0, 2)]
    {
        let slice = region.remote(offset, len).unwrap();
        assert_eq!((slice.rkey, slice.len), (keys[piece], len), "{offset}");
    }
    for (offset, len) in [(PIECE - 1, 2), (0, LEN), (2 * PIECE - 1, 4097)] {
        let refused = region.remote(offset, len).unwrap_err();
        assert_eq!(refused.cause, Cause::AcrossPieces { offset, len, piece: PIECE });
        assert!(refused.to_string().contains("max_mr_size") && !refused.is_transient(), "{refused}");
    }
    assert!(matches!(region.remote(LEN, 1).unwrap_err().cause, Cause::OutOfRange { .. }));
}

#[test]
fn a_local_slice_that_crosses_borders_is_one_for_each_piece() {
    let (all, region) = in_pieces();
    let base = region.memory().address().addr() as u64;
    post(&all, vec![at(&region, PIECE - 100, PIECE + 200)], anywhere(PIECE + 200)).unwrap();
    let posted = world(|world| std::mem::take(&mut world.slices));
    let expected = [(base + PIECE - 100, 100), (base + PIECE, PIECE as u32), (base + 2 * PIECE, 100)];
    assert_eq!(posted.iter().map(|sge| (sge.addr, sge.length)).collect::<Vec<_>>(), expected);
    let keys: Vec<_> = posted.iter().map(|sge| sge.lkey).collect();
    assert!(keys[0] != keys[1] && keys[1] != keys[2], "{keys:?}");
    // One that crosses nothing, behind one that does, in one batch.
    let batch = [(PIECE - 1, 2), (PIECE, 50), (10, 20)].map(|(offset, len)| WorkRequest {
        id: offset,
        opcode: Opcode::Read,
        local: vec![at(&region, offset, len)],
        remote: Some(anywhere(len)),
    });
    #[allow(unsafe_code)]
    // SAFETY: the fakes touch no memory.
    unsafe { all.qp.post_send(batch.into()) }.unwrap();
    let posted = world(|world| std::mem::take(&mut world.slices));
    let expected = [(PIECE - 1, keys[0]), (PIECE, keys[1]), (PIECE, keys[1]), (10, keys[0])];
    assert_eq!(posted.iter().map(|sge| (sge.addr - base, sge.lkey)).collect::<Vec<_>>(), expected);
    assert_eq!(posted.iter().map(|sge| sge.length).collect::<Vec<_>>(), [1, 1, 50, 20]);
    // The device takes 4 slices.
    let many = vec![at(&region, PIECE - 1, 2); 3];
    let refused = post(&all, many, anywhere(6)).unwrap_err().cause;
    assert_eq!(refused, Cause::Limit { what: "max_sge", have: 4, need: 6 });
    assert!(world(|world| world.slices.is_empty()));
}

#[test]
fn receives_and_windows_cross_no_border() {
    let (all, region) = in_pieces();
    let across = Cause::AcrossPieces { offset: PIECE - 1, len: 2, piece: PIECE };
    #[allow(unsafe_code)]
    // SAFETY: the fakes touch no memory.
    let receive = |slice| unsafe { all.qp.post_recv(ReceiveRequest { id: 1, local: Some(slice) }) };
    assert_eq!(receive(at(&region, PIECE - 1, 2)).unwrap_err().cause, across);
    receive(at(&region, PIECE, 2)).unwrap();
    assert_eq!(region.bind(&all.qp, PIECE - 1, 2).unwrap_err().cause, across);
    let window = region.bind(&all.qp, PIECE, 100).unwrap();
    let second = region.remote(PIECE, 1).unwrap();
    assert_eq!((window.remote().address, window.remote().len), (second.address, 100));
    let opened = world(|world| world.bound_to[&(window.remote().rkey as u32)]);
    assert_eq!(u64::from(opened), second.rkey, "the region of the second piece");
}

#[test]
fn a_piece_that_fails_leaves_none() {
    let (all, region) = in_pieces();
    drop(region);
    let before = world(|world| world.live["mr"]);
    for failing in 0..3 {
        world(|world| {
            world.calls.clear();
            world.fail = Some((failing, libc::EAGAIN));
        });
        let refused = all.pd.register(Memory::shared(LEN, HugePages::Off).unwrap(), ACCESS).unwrap_err();
        assert_eq!(refused.cause, Cause::Os { errno: libc::EAGAIN, call: "ibv_reg_mr" });
        assert!(refused.is_transient(), "B7");
        assert_eq!(world(|world| (world.live["mr"], world.busy.len())), (before, 0));
    }
}

#[test]
fn a_limit_of_the_devices_is_named_or_set_aside() {
    world(|world| world.max_mr_size = 100);
    let register = |provider: &super::IbvProvider| {
        let pd = provider.open("fake0").unwrap().alloc_pd().unwrap();
        pd.register(Memory::shared(LEN, HugePages::Off).unwrap(), Access::empty())
    };
    let refused = register(&provider()).unwrap_err().cause;
    assert_eq!(refused, Cause::Limit { what: "max_mr_size", have: 100, need: crate::memory::page_size() });
    // B10: the driver says less than the device takes.
    assert_eq!(register(&provider().max_region(1 << 20)).unwrap().piece_len(), LEN);
    assert_eq!(register(&provider().max_region(MOST)).unwrap().piece_len(), PIECE);
}

// I14: the least, and through the function that knows it.
#[test]
fn regions_have_the_rights_that_were_asked_for_and_no_others() {
    let register = |provider: &super::IbvProvider, access| {
        let pd = provider.open("fake0").unwrap().alloc_pd().unwrap();
        world(|world| world.registered.clear());
        pd.register(Memory::shared(1, HugePages::Off).unwrap(), access).unwrap();
        world(|world| (world.registered[0].0, world.registered[0].3))
    };
    let with = |access| register(&provider(), access);
    assert_eq!(with(Access::empty()), ("reg_mr", 0));
    assert_eq!(with(Access::REMOTE_READ), ("reg_mr", IBV_ACCESS_REMOTE_READ));
    let pool = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND;
    assert_eq!(with(ACCESS), ("reg_mr", pool));
    let relaxed = ACCESS | Access::RELAXED_ORDERING;
    assert_eq!(with(relaxed), ("reg_mr_iova2", pool | IBV_ACCESS_RELAXED_ORDERING));
    assert_eq!(register(&provider_without("ibv_reg_mr_iova2"), relaxed), ("reg_mr", pool), "a hint");
    // What every queue pair and connection makes for itself: to be read by the peer, and to be read into.
    world(|world| world.registered.clear());
    let all = All::new();
    let own = world(|world| world.registered.iter().map(|made| made.3).collect::<Vec<_>>());
    assert_eq!(own, [pool & !IBV_ACCESS_MW_BIND, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_LOCAL_WRITE]);
    assert!(all.pd.create_qp(&all.cq, &all.cq, CAPACITY).is_ok());
}
