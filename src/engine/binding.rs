//! Grants whose keys the device does not know yet: their peers are told when it does.
//!
//! A window is bound in the order of its queue pair's send queue, and the grant travels over another connection: told at
//! once, the peer could read before the key is valid, which breaks the queue pair. The lease begins all the same, so that
//! what was exposed is fenced by its deadline, its link's end or its holder's word as ever.

use super::grants::Exposure;
use super::{Engine, Tick};
use towline_control::wire::{self, Frame, GrantFlags, RefuseCode, Segment};

/// What a peer is told of a lease.
pub(super) struct Told {
    pub(super) request: u64,
    pub(super) echo: Tick,
    pub(super) layout: Vec<u8>,
    pub(super) segments: Vec<Segment>,
    pub(super) eager: Vec<u8>,
}

impl Engine {
    /// Tells the peer of a new lease, now or when its keys are valid.
    pub(super) fn tell_grant(&mut self, lease: u64, told: Told) {
        let Some(grant) = self.grants.get(&lease) else { return };
        if grant.exposure.is_bound() {
            self.send_grant(lease, &told);
        } else {
            self.unbound.insert(lease, told);
        }
    }

    /// Tells of the leases whose keys have become valid.
    pub(super) fn handle_bindings(&mut self) {
        let unbound: Vec<u64> = self.unbound.keys().copied().collect();
        for lease in unbound {
            let Some(grant) = self.grants.get(&lease) else { continue };
            if grant.exposure.is_bound()
                && let Some(told) = self.unbound.remove(&lease)
            {
                self.send_grant(lease, &told);
            }
        }
    }

    /// A lease ends, by its deadline or with its link: a peer that was not told of it yet won't be.
    pub(super) fn never_told(&mut self, lease: u64) {
        let Some(told) = self.unbound.remove(&lease) else { return };
        let link = self.grants.get(&lease).map(|grant| grant.link);
        if let Some(link) = link.filter(|link| self.links.contains_key(link)) {
            self.refuse(link, told.request, RefuseCode::Failed, 0, "the device did not open the memory in time");
        }
    }

    fn send_grant(&mut self, lease: u64, told: &Told) {
        let lease_us = self.config.times.lease / 1000;
        let Some(grant) = self.grants.get(&lease) else { return };
        let (link, id, lent) = (grant.link, grant.payload, grant.lent);
        let Some(payload) = self.payload(id) else { return };
        // Who is lent what is not copied yet has no need to read behind the copy.
        let (watermark, total_len) = (if lent { payload.total } else { payload.watermark }, payload.total);
        if let Some(grant) = self.grants.get_mut(&lease) {
            grant.told = watermark;
        }
        let frame = wire::Grant {
            request: told.request,
            lease,
            slot: id.slot,
            generation: id.generation,
            echo: told.echo,
            lease_us,
            watermark,
            total_len,
            provider: 0,
            flags: GrantFlags::empty(),
            layout: &told.layout,
            segments: &told.segments,
            eager: &told.eager,
        };
        self.send(link, &Frame::Grant(frame));
    }
}

impl Exposure {
    /// Whether the peer can use what it is to be told.
    fn is_bound(&self) -> bool {
        match self {
            Self::Windows(windows) => windows.iter().all(towline_verbs::MemoryWindow::is_bound),
            Self::None | Self::Region(_) | Self::Mapped => true,
        }
    }
}
