//! Tries of a get: asking for its payload over a link, and asking again when links and reads fail.

use super::Engine;
use super::end::Failure;
use super::gets::{Source, Stage};
use super::link::{Link, LinkId, State};
use super::{OperationId, Tick, Timer};
use crate::ErrorKind;
use towline_control::wire::{self, Frame, Get as GetFrame, GetFlags, Outcome};
use towline_verbs::CompletionStatus;

/// Most bytes that travel inside a grant where the producer's memory is mapped: from here on copying them out of there
/// is faster than sending them through a socket (measured at a payload of 16 KiB: 31 against 32 us; 64 KiB: 34 against
/// 55 us).
const EAGER_MAPPED: u32 = 16 << 10;

enum OwnedTarget {
    Key(Vec<u8>),
    Slot { slot: u32, generation: u32 },
}

impl Engine {
    pub(super) fn try_get(&mut self, operation: OperationId) {
        let Some(get) = self.gets.get(&operation) else { return };
        let target = get.target.clone();
        match self.link_to(&target) {
            Err(kind) => self.finish(operation, Err(kind)),
            Ok(link) => {
                self.move_get(operation, link);
                if let Some(link) = self.links.get_mut(&link) {
                    link.gets.insert(operation);
                }
                if self.links.get(&link).is_some_and(Link::is_open) {
                    self.send_request(link, operation);
                }
            }
        }
    }

    /// The get's link is `link` from now on, and it has no request there yet.
    pub(super) fn move_get(&mut self, operation: OperationId, link: LinkId) {
        if let Some(get) = self.gets.get_mut(&operation) {
            get.link = Some(link);
            get.stage = Stage::AwaitLink;
        }
    }

    /// A read of the get's last try failed in this way.
    pub(super) fn read_refused(&mut self, operation: OperationId, status: CompletionStatus, vendor: u32) {
        let lost = matches!(status, CompletionStatus::Flushed | CompletionStatus::TransportRetryExceeded);
        if let Some(get) = self.gets.get_mut(&operation) {
            get.refused = (!lost).then_some((status, vendor));
        }
    }

    /// The get waits for its link to agree on another path.
    pub(super) fn await_link(&mut self, operation: OperationId) {
        let Some(get) = self.gets.get_mut(&operation) else { return };
        if let Stage::Reading(_) = get.stage {
            get.stage = Stage::AwaitLink;
        } else if let Stage::Requested(request) = get.stage {
            get.stage = Stage::AwaitLink;
            let link = get.link;
            if let Some(link) = link.and_then(|link| self.links.get_mut(&link)) {
                link.requests.remove(&request);
            }
            if let Some(link) = link {
                self.cancel_on(link, request);
            }
        }
    }

    pub(super) fn send_requests(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id) else { return };
        let gets: Vec<OperationId> = link.gets.iter().copied().collect();
        for operation in gets {
            if self.gets.get(&operation).is_some_and(|get| matches!(get.stage, Stage::AwaitLink)) {
                self.send_request(id, operation);
            }
        }
    }

    fn send_request(&mut self, id: LinkId, operation: OperationId) {
        let now = self.now;
        if !self.links.get(&id).is_some_and(|link| self.has_room(link)) {
            self.put_off(id); // it asks when the peer has taken more of what was said
            return;
        }
        let mut eager = self.config.limits.eager;
        let rail = self.links.get(&id).and_then(|link| link.rail);
        if rail.is_some_and(|rail| self.rails[rail].device.info().capabilities.mappable) {
            eager = eager.min(EAGER_MAPPED);
        }
        let request = self.new_operation().0;
        let Some(get) = self.gets.get_mut(&operation) else { return };
        get.stage = Stage::Requested(request);
        let target = match &get.source {
            Source::Ticket(ticket) => OwnedTarget::Slot { slot: ticket.slot, generation: ticket.generation },
            Source::Key { key, .. } => OwnedTarget::Key(key.clone()),
        };
        let frame = GetFrame {
            request,
            target: match &target {
                OwnedTarget::Slot { slot, generation } => wire::Target::Slot { slot: *slot, generation: *generation },
                OwnedTarget::Key(key) => wire::Target::Key(key),
            },
            wait_us: get.deadline.saturating_sub(now) / 1000,
            sent_at: now,
            max_eager: if get.view { 0 } else { eager },
            flags: if get.view { GetFlags::VIEW } else { GetFlags::empty() },
            provider: 0,
        };
        if let Some(link) = self.links.get_mut(&id) {
            link.requests.insert(request, operation);
        }
        self.send(id, &Frame::Get(frame));
        self.start_keep_alive(id);
    }

    /// The link under a get has ended.
    pub(super) fn link_failed_under(&mut self, operation: OperationId, failure: &Failure) {
        let Some(get) = self.gets.get_mut(&operation) else { return };
        get.link = None;
        match failure {
            Failure::Closing => self.give_up(operation, ErrorKind::Closed),
            Failure::Final(kind) => self.give_up(operation, kind.clone()),
            Failure::Protocol(what) => self.give_up(operation, ErrorKind::Protocol { what: what.clone() }),
            Failure::Unreachable(kind) => match &get.lost {
                Some(lost) if get.tries >= self.config.limits.tries => {
                    let why = format!("{lost}; then {kind}");
                    self.give_up(operation, ErrorKind::PeerLost { why });
                }
                Some(_) => self.again(operation, &kind.to_string()),
                None => self.give_up(operation, kind.clone()),
            },
            Failure::Lost(why) => self.again(operation, why),
            Failure::Renewed(_) => self.again_for_nothing(operation),
        }
    }

    /// Another try, after whatever the last one posted is fenced.
    pub(super) fn again(&mut self, operation: OperationId, why: &str) {
        let Some(get) = self.gets.get_mut(&operation) else { return };
        get.tries += 1;
        if get.lost.is_none() {
            get.lost = Some(why.to_owned());
        }
        if get.tries > self.config.limits.tries {
            let kind = match get.refused {
                Some((status, vendor)) => {
                    ErrorKind::TransferFailed { status: status.text(), vendor, tries: self.config.limits.tries }
                }
                None => ErrorKind::PeerLost { why: get.lost.clone().unwrap_or_default() },
            };
            self.give_up(operation, kind);
            return;
        }
        self.begin_anew(operation);
    }

    /// The same for one whose link was given up for another's sake: it loses nothing by it but time.
    fn again_for_nothing(&mut self, operation: OperationId) {
        let Some(get) = self.gets.get_mut(&operation) else { return };
        get.renewals = get.renewals.saturating_add(1);
        self.begin_anew(operation);
    }

    fn begin_anew(&mut self, operation: OperationId) {
        const FIRST_PAUSE: Tick = 10_000_000;
        let now = self.now;
        let Some(get) = self.gets.get_mut(&operation) else { return };
        self.stats.retries += 1;
        let before = (get.tries + get.renewals).saturating_sub(1);
        let pause = if before == 0 { 0 } else { FIRST_PAUSE << (before - 1).min(6) };
        let stage = std::mem::replace(&mut get.stage, Stage::AwaitLink);
        match stage {
            Stage::Reading(transfer) => {
                get.stage = Stage::AwaitFence;
                self.abandon_fetch(transfer, towline_core::transfer::Reason::Failed(towline_core::transfer::Cause(0)));
            }
            Stage::AwaitFence => get.stage = Stage::AwaitFence,
            Stage::AwaitRoom(leased) | Stage::AwaitRemote(leased, ..) => {
                self.leave_room(operation);
                self.close_lease_of(leased.held, Outcome::Failed);
                self.timers.set(now + pause, Timer::Remote(operation));
            }
            Stage::AwaitLink | Stage::Requested(_) => {
                self.timers.set(now + pause, Timer::Remote(operation));
            }
        }
    }

    /// A get's timer: its turn to be tried again, or another look at whether its remote memory is there.
    pub(super) fn remote_again(&mut self, operation: OperationId) {
        let Some(get) = self.gets.get(&operation) else { return };
        match get.stage {
            Stage::AwaitLink => match get.link {
                None => self.try_get(operation),
                Some(link) if self.links.get(&link).is_some_and(Link::is_open) => self.send_request(link, operation),
                Some(_) => {}
            },
            Stage::AwaitRemote(..) => self.try_remote(operation),
            _ => {}
        }
    }

    /// The last try's reads are fenced: on with the next.
    pub(super) fn fetch_fenced(&mut self, operation: OperationId) {
        let Some(get) = self.gets.get_mut(&operation) else { return };
        get.stage = Stage::AwaitLink;
        match get.link {
            Some(link) if self.links.get(&link).is_some_and(Link::is_open) => self.send_request(link, operation),
            Some(_) => {}
            None => self.try_get(operation),
        }
    }

    pub(super) fn get_deadline(&mut self, operation: OperationId) {
        let Some(get) = self.gets.get_mut(&operation) else { return };
        get.timer = None;
        let waiting_for = match &get.stage {
            Stage::AwaitLink => match get.link.and_then(|link| self.links.get(&link)).map(|link| link.state) {
                Some(State::Dialing) | None => "a connection",
                Some(State::Open) => "the peer to take what was sent before",
                Some(_) => "the peer to agree on a path",
            },
            Stage::Requested(_) => match &get.source {
                Source::Ticket(_) => "the producer's answer",
                Source::Key { .. } => "a payload to be put under the key",
            },
            Stage::AwaitRoom(leased) => {
                let need = leased.layout.destination_len();
                let (free, largest) = (self.pool.free(), self.pool.largest_free_run());
                self.give_up(operation, ErrorKind::PoolFull { need, free, largest });
                return;
            }
            Stage::AwaitRemote(..) => "the data connection",
            Stage::Reading(_) => "the payload's bytes",
            Stage::AwaitFence => "reads of a failed try to end",
        };
        self.give_up(operation, ErrorKind::TimedOut { waiting_for, quarantined: 0 });
    }
}
