use super::*;
use crate::Word;
use proptest::prelude::*;
use std::sync::atomic::{AtomicU32, Ordering};
use std::vec::Vec;

fn words(n: usize) -> Vec<Word> {
    (0..n).map(|_| Word::default()).collect()
}

fn payloads(capacity: usize) -> PayloadTable<Vec<Word>> {
    PayloadTable::new(words(payload_words(capacity)))
}

fn publication(consumers: Consumers) -> Publication {
    Publication { len: 100, filled: 100, consumers, keep: 50 }
}

#[test]
fn a_payload_for_two_ends_with_the_second() {
    let table = payloads(1);
    let id = table.publish(publication(Consumers::Count(2)), 0).unwrap();
    assert_eq!((table.open(id), table.open(id)), (Ok(100), Ok(100)));
    assert_eq!(table.open(id), Err(PayloadRefused::Taken { id, readers: 2 }));
    assert_eq!(table.close(id, Use::Consumed, 1), Ok(Progress::Kept { readers: 1 }));
    assert_eq!(table.close(id, Use::Returned, 2), Ok(Progress::Kept { readers: 0 }));
    assert_eq!(table.close(id, Use::Consumed, 2), Err(PayloadRefused::NotOpen { id }));
    assert_eq!(table.release(id), Err(PayloadRefused::NotEnded { id, readers: 0 }));
    table.open(id).unwrap();
    assert_eq!(table.close(id, Use::Consumed, 3), Ok(Progress::Ended(End::Consumed)));
    assert_eq!(table.open(id), Err(PayloadRefused::Ended { id, end: End::Consumed }));
    assert_eq!(table.release(id), Ok(End::Consumed));
    assert_eq!(table.release(id), Err(PayloadRefused::Stale { id }));
}

#[test]
fn removal_waits_for_the_readers() {
    let table = payloads(2);
    let id = table.publish(publication(Consumers::Unlimited), 0).unwrap();
    table.open(id).unwrap();
    assert_eq!(table.remove(id, Removal::Replaced), Ok(Progress::Kept { readers: 1 }));
    assert_eq!(table.remove(id, Removal::Removed), Err(PayloadRefused::Ended { id, end: End::Replaced }));
    assert_eq!(table.open(id), Err(PayloadRefused::Ended { id, end: End::Replaced }));
    assert_eq!(table.phase(id), Ok((PayloadPhase::Retiring, 1)));
    assert_eq!(table.close(id, Use::Returned, 9), Ok(Progress::Ended(End::Replaced)));
    let id = table.publish(publication(Consumers::Count(1)), 0).unwrap();
    assert_eq!(table.remove(id, Removal::Removed), Ok(Progress::Ended(End::Removed)));
}

#[test]
fn expiry_counts_from_the_last_use_and_spares_what_is_read() {
    let table = payloads(1);
    let id = table.publish(publication(Consumers::Unlimited), 10).unwrap();
    assert_eq!(table.expire(id, 59), Ok(Expiry::NotBefore(60)));
    table.open(id).unwrap();
    assert_eq!(table.expire(id, 1000), Ok(Expiry::InUse { readers: 1 }));
    table.close(id, Use::Consumed, 1000).unwrap();
    assert_eq!(table.expire(id, 1049), Ok(Expiry::NotBefore(1050)));
    assert_eq!(table.expire(id, 1050), Ok(Expiry::Ended));
    assert_eq!(table.expire(id, 1050), Err(PayloadRefused::Ended { id, end: End::Expired }));
    table.release(id).unwrap();
    let id = table.publish(Publication { keep: u64::MAX, ..publication(Consumers::Unlimited) }, 10).unwrap();
    assert_eq!(table.expire(id, u64::MAX), Ok(Expiry::NotBefore(u64::MAX)));
}

#[test]
fn a_watermark_rises_within_the_payload_and_never_falls() {
    let table = payloads(1);
    let id = table.publish(Publication { filled: 0, ..publication(Consumers::Count(1)) }, 0).unwrap();
    assert_eq!(table.open(id), Ok(0));
    table.fill(id, 60).unwrap();
    table.fill(id, 40).unwrap();
    assert_eq!(table.watermark(id), Ok(60));
    assert_eq!(table.fill(id, 101), Err(PayloadRefused::BeyondEnd { id, filled: 101, len: 100 }));
    table.close(id, Use::Consumed, 0).unwrap();
    table.release(id).unwrap();
    let next = table.publish(Publication { filled: 3, ..publication(Consumers::Count(1)) }, 0).unwrap();
    assert_eq!(table.fill(id, 60), Err(PayloadRefused::Stale { id }));
    assert_eq!(table.watermark(next), Ok(3));
}

#[test]
fn what_cannot_be_published_is_refused() {
    let table = payloads(1);
    for consumers in [0, MAX_CONSUMERS + 1] {
        let refused = table.publish(publication(Consumers::Count(consumers)), 0);
        assert_eq!(refused, Err(PublishError::Consumers { consumers }));
    }
    for (len, filled) in [(10, 11), (MAX_PAYLOAD + 1, 0)] {
        let refused = table.publish(Publication { len, filled, ..publication(Consumers::Count(1)) }, 0);
        assert_eq!(refused, Err(PublishError::Length { len, filled }));
    }
    table
        .publish(Publication { len: MAX_PAYLOAD, filled: 0, ..publication(Consumers::Count(MAX_CONSUMERS)) }, 0)
        .unwrap();
    assert_eq!(table.publish(publication(Consumers::Count(1)), 0), Err(PublishError::Full { capacity: 1 }));
}

#[test]
fn readers_have_a_limit() {
    let table = payloads(1);
    let id = table.publish(publication(Consumers::Unlimited), 0).unwrap();
    (0..MAX_READERS).for_each(|_| assert_eq!(table.open(id), Ok(100)));
    assert_eq!(table.open(id), Err(PayloadRefused::Taken { id, readers: MAX_READERS }));
}

#[test]
fn a_lease_ends_once_by_close_or_by_deadline() {
    let leases = LeaseTable::new(words(lease_words(1)));
    let payload = PayloadId::from_parts(3, 77);
    let id = leases.grant(payload, 100).unwrap();
    assert_eq!(leases.grant(payload, 100), Err(TableFull { capacity: 1 }));
    assert_eq!(leases.get(id), Ok((payload, 100)));
    assert_eq!(leases.expire(id, 99), Ok(LeaseExpiry::NotBefore(100)));
    leases.renew(id, 200).unwrap();
    leases.renew(id, 150).unwrap();
    assert_eq!(leases.expire(id, 199), Ok(LeaseExpiry::NotBefore(200)));
    assert_eq!(leases.expire(id, 200), Ok(LeaseExpiry::Ended(payload)));
    for refused in
        [leases.close(id).err(), leases.renew(id, 1).err(), leases.get(id).err(), leases.expire(id, 300).err()]
    {
        assert_eq!(refused, Some(LeaseRefused::Ended { id }));
    }
    let next = leases.grant(payload, 100).unwrap();
    assert_ne!(next, id);
    assert_eq!(leases.close(next), Ok(payload));
    let none = LeaseId::from_parts(1, 0);
    assert_eq!(leases.close(none), Err(LeaseRefused::Unknown { id: none }));
}

/// I2: of all that may end a payload and its leases at once, each end is told to one.
#[test]
fn threads_end_leases_and_payload_exactly_once() {
    for round in 0..400u64 {
        let (payloads, leases) = (payloads(1), LeaseTable::new(words(lease_words(2))));
        let payload = payloads.publish(publication(Consumers::Count(2)), 0).unwrap();
        let granted: Vec<_> = (0..2)
            .map(|_| {
                payloads.open(payload).unwrap();
                leases.grant(payload, 10).unwrap()
            })
            .collect();
        let (closed, ended) = (AtomicU32::new(0), AtomicU32::new(0));
        let tell = |progress| {
            if let Ok(Progress::Ended(_)) = progress {
                ended.fetch_add(1, Ordering::Relaxed);
            }
        };
        let close = |payload, how| {
            closed.fetch_add(1, Ordering::Relaxed);
            tell(payloads.close(payload, how, 20));
        };
        std::thread::scope(|scope| {
            for &lease in &granted {
                let (leases, close) = (&leases, &close);
                scope.spawn(move || leases.close(lease).map(|payload| close(payload, Use::Consumed)));
                scope.spawn(move || {
                    if let Ok(LeaseExpiry::Ended(payload)) = leases.expire(lease, 10) {
                        close(payload, Use::Returned);
                    }
                });
            }
            if round % 2 == 0 {
                tell(payloads.remove(payload, Removal::Removed));
            }
        });
        if round % 2 == 1 {
            tell(payloads.remove(payload, Removal::Removed));
        }
        assert_eq!((closed.into_inner(), ended.into_inner()), (2, 1), "round {round}");
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Open,
    Close(bool),
    Remove(bool),
    Expire,
    Wait(u64),
    Release,
}

/// One payload in words: seats left, readers, the end that was decided, the time of the last use.
#[derive(Debug, Clone, Copy)]
struct Model {
    seats: Option<u32>,
    readers: u32,
    end: Option<End>,
    expires: u64,
    released: bool,
}

impl Model {
    fn ended(self) -> bool {
        self.end.is_some() && self.readers == 0
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn a_payload_does_what_its_model_does(
        count in proptest::option::of(1u32..4),
        keep in 0u64..40,
        steps in proptest::collection::vec(prop_oneof![
            4 => Just(Step::Open),
            4 => any::<bool>().prop_map(Step::Close),
            1 => any::<bool>().prop_map(Step::Remove),
            1 => Just(Step::Expire),
            2 => (0u64..30).prop_map(Step::Wait),
            1 => Just(Step::Release),
        ], 1..60),
    ) {
        let table = payloads(1);
        let consumers = count.map_or(Consumers::Unlimited, Consumers::Count);
        let mut now = 5;
        let id = table.publish(Publication { len: 9, filled: 9, consumers, keep }, now).unwrap();
        let mut model = Model { seats: count, readers: 0, end: None, expires: now + keep, released: false };
        for step in steps {
            let before = model;
            let live = model.end.is_none() && !model.released;
            match step {
                Step::Wait(ticks) => now += ticks,
                Step::Open => {
                    let legal = live && model.seats != Some(0);
                    prop_assert_eq!(table.open(id).is_ok(), legal);
                    if legal {
                        model.readers += 1;
                        model.seats = model.seats.map(|seats| seats - 1);
                    }
                }
                Step::Close(consumed) => {
                    let legal = model.readers > 0;
                    let told = table.close(id, if consumed { Use::Consumed } else { Use::Returned }, now);
                    prop_assert_eq!(told.is_ok(), legal);
                    if legal {
                        model.readers -= 1;
                        model.expires = now + keep;
                        if !consumed {
                            model.seats = model.seats.map(|seats| seats + 1);
                        }
                        if model.end.is_none() && model.seats == Some(0) && model.readers == 0 {
                            model.end = Some(End::Consumed);
                        }
                        prop_assert_eq!(matches!(told, Ok(Progress::Ended(_))), model.ended());
                    }
                }
                Step::Remove(replaced) => {
                    let told = table.remove(id, if replaced { Removal::Replaced } else { Removal::Removed });
                    prop_assert_eq!(told.is_ok(), live);
                    if live {
                        model.end = Some(if replaced { End::Replaced } else { End::Removed });
                        prop_assert_eq!(matches!(told, Ok(Progress::Ended(_))), model.ended());
                    }
                }
                Step::Expire => {
                    let told = table.expire(id, now);
                    prop_assert_eq!(told.is_ok(), live);
                    if live && model.readers > 0 {
                        prop_assert_eq!(told, Ok(Expiry::InUse { readers: model.readers }));
                    } else if live && now < model.expires {
                        prop_assert_eq!(told, Ok(Expiry::NotBefore(model.expires)));
                    } else if live {
                        prop_assert_eq!(told, Ok(Expiry::Ended));
                        model.end = Some(End::Expired);
                    }
                }
                Step::Release => {
                    let told = table.release(id);
                    prop_assert_eq!(told.ok(), if before.ended() && !before.released { before.end } else { None });
                    model.released |= before.ended();
                }
            }
        }
    }
}
