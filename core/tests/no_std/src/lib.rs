//! A static library without std, without an allocator and with a panic handler of its own, that uses every part.

#![no_std]

use towline_core::Word;
use towline_core::credits::{SendQueue, Signal};
use towline_core::lease::{Consumers, PayloadTable, Publication, payload_words};
use towline_core::pool::{BufferPool, PoolLayout};
use towline_core::split::{Limits, Segment, Split};
use towline_core::transfer::{TransferTable, storage_words};

const LAYOUT: PoolLayout = match PoolLayout::new(1 << 20, 4096) {
    Ok(layout) => layout,
    Err(_) => panic!("a legal layout"),
};
static POOL: [Word; LAYOUT.words()] = [const { Word::new() }; LAYOUT.words()];
static TRANSFERS: [Word; storage_words(8)] = [const { Word::new() }; storage_words(8)];
static PAYLOADS: [Word; payload_words(8)] = [const { Word::new() }; payload_words(8)];
static QUEUE: [Word; 8] = [const { Word::new() }; 8];

/// Uses every part; the number of things that went as they should.
#[unsafe(no_mangle)]
pub extern "C" fn towline_core_works() -> u32 {
    let pool = BufferPool::new(&POOL[..], LAYOUT).ok().and_then(|pool| {
        let extent = pool.allocate(5000, 1).ok()?;
        pool.release(extent).ok()
    });
    let table = TransferTable::new(&TRANSFERS[..]);
    let transfer = table.create().and_then(|id| Ok(table.finish(id))).is_ok();
    let payloads = PayloadTable::new(&PAYLOADS[..]);
    let publication = Publication { len: 1, filled: 1, consumers: Consumers::Count(1), keep: 1 };
    let payload = payloads.publish(publication, 0).is_ok();
    let (a, b) = (Segment { region: 0, offset: 0, len: 100 }, Segment { region: 0, offset: 7, len: 100 });
    let chunks = Limits::new(30).and_then(|limits| Split::new(&a, &b, limits)).map_or(0, Iterator::count);
    let signal = SendQueue::new(&QUEUE[..], 1).post(1, false);
    u32::from(pool.is_some())
        + u32::from(transfer)
        + u32::from(payload)
        + u32::from(chunks == 4)
        + u32::from(signal == Ok(Signal::Signalled))
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
