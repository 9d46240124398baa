//! Simulated byte connections between nodes, on the fabric's clock: what carries control frames.
//!
//! A connection is two ends, each with its own [`ConnId`]. Bytes of one direction arrive in order or not at all; how
//! they are cut into pieces, when they arrive, and whether the connection survives is up to the seed and the
//! [`NetPlan`](super::NetPlan). There is no bandwidth and no back-pressure: [`SimNet::send`] takes everything.

use super::state::{Event, State};
use super::trace::digest;
use super::{NodeId, Shared};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// One end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(u64);

/// What a node learns about its connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetEvent {
    /// A peer dialled; this is our end.
    Accepted {
        /// Our end.
        conn: ConnId,
        /// Who dialled.
        from: NodeId,
        /// Which of our ports.
        port: u16,
    },
    /// Our dial was accepted.
    Connected {
        /// Our end.
        conn: ConnId,
    },
    /// Our dial was refused; the end is gone.
    Refused {
        /// Our end.
        conn: ConnId,
    },
    /// Bytes, at least one.
    Bytes {
        /// Our end.
        conn: ConnId,
        /// The bytes.
        data: Vec<u8>,
    },
    /// The peer closed, or the connection was reset; the end is gone.
    Closed {
        /// Our end.
        conn: ConnId,
    },
}

/// The byte network of a [`SimFabric`](super::SimFabric). Clones are handles of the same network.
#[derive(Debug, Clone)]
pub struct SimNet(pub(super) Arc<Shared>);

impl SimNet {
    /// Lets `node` accept connections at a port, or not any more. A node that has crashed stops by itself.
    pub fn listen(&self, node: NodeId, port: u16, accept: bool) {
        self.0.with(|state| {
            state.node(node);
            let listening = &mut state.net.listening;
            if accept {
                listening.insert((node, port))
            } else {
                listening.remove(&(node, port))
            };
        });
    }

    /// Opens a connection from one node to a port of another (or of itself) and returns the near end. Bytes may be
    /// sent at once; they arrive after the peer's [`NetEvent::Accepted`]. Ends in [`NetEvent::Connected`] or [`NetEvent::Refused`],
    /// or, when the peer is unreachable, in neither: the caller needs a deadline.
    #[must_use]
    pub fn dial(&self, from: NodeId, to: NodeId, port: u16) -> ConnId {
        self.0.with(|state| state.dial(from, to, port))
    }

    /// Sends bytes. On an end that is gone they are dropped, as by a socket whose peer has gone.
    pub fn send(&self, conn: ConnId, bytes: &[u8]) {
        self.0.with(|state| state.net_send(conn.0, bytes));
    }

    /// Closes an end: what was sent arrives, then the peer is told. There is no event for this end.
    pub fn close(&self, conn: ConnId) {
        self.0.with(|state| state.net_close(conn.0));
    }

    /// Cuts a connection as a failure would: what is on its way is lost, and both ends are told after a while.
    pub fn reset(&self, conn: ConnId) {
        self.0.with(|state| state.net_reset(conn.0));
    }

    /// Whether the node at the other end has crashed since the connection was dialled (what a process descriptor of the
    /// peer would tell); also when this end is gone.
    #[must_use]
    pub fn peer_has_crashed(&self, conn: ConnId) -> bool {
        self.0.with(|state| {
            let life = |node: NodeId| state.nodes.get(&node).map_or(0, |node| node.life);
            state.net.ends.get(&conn.0).is_none_or(|end| life(end.other_node) != end.other_life)
        })
    }

    /// The next thing that `node` learns.
    #[must_use]
    pub fn poll(&self, node: NodeId) -> Option<NetEvent> {
        self.0.with(|state| state.net.inboxes.get_mut(&node)?.pop_front())
    }

    /// Connection ends that are open, of all nodes.
    #[must_use]
    pub fn open_ends(&self) -> usize {
        self.0.with(|state| state.net.ends.len())
    }
}

/// What is on its way to an end.
#[derive(Debug)]
enum Item {
    Accept { from: NodeId, port: u16 },
    Connect,
    Refuse,
    Bytes(Vec<u8>),
    Close,
}

#[derive(Debug)]
struct End {
    node: NodeId,
    other: u64,
    other_node: NodeId,
    other_life: u64,
    /// What is on its way to this end, oldest first, and when the last of it arrives.
    arriving: VecDeque<Item>,
    last_arrival: u64,
    silent: bool,
    /// Our side has closed: nothing is told any more.
    closed: bool,
}

/// All connections.
#[derive(Debug, Default)]
pub(super) struct Net {
    ends: BTreeMap<u64, End>,
    inboxes: BTreeMap<NodeId, VecDeque<NetEvent>>,
    listening: BTreeSet<(NodeId, u16)>,
}

impl State {
    fn dial(&mut self, from: NodeId, to: NodeId, port: u16) -> ConnId {
        let (near, far) = (self.fresh(), self.fresh());
        self.note("dial", &[u64::from(from.0), u64::from(to.0), u64::from(port), near]);
        let (near_life, far_life) = (self.node(from).life, self.node(to).life);
        for (end, node, other, other_node, other_life) in
            [(near, from, far, to, far_life), (far, to, near, from, near_life)]
        {
            let arriving = VecDeque::new();
            let end_state =
                End { node, other, other_node, other_life, arriving, last_arrival: 0, silent: false, closed: false };
            self.net.ends.insert(end, end_state);
        }
        if self.plan.net.silence.draw(&mut self.random) {
            self.fall_silent(near);
        }
        self.net_schedule(far, Item::Accept { from, port }, false);
        ConnId(near)
    }

    /// Puts `item` on its way to `end`, behind what is already on its way.
    fn net_schedule(&mut self, end: u64, item: Item, glued: bool) {
        let latency = self.draw(self.plan.net.latency);
        let now = self.now;
        let Some(state) = self.net.ends.get_mut(&end) else { return };
        let at = if glued { state.last_arrival.max(now) } else { state.last_arrival.max(now + latency) };
        state.last_arrival = at;
        state.arriving.push_back(item);
        self.schedule(at, Event::Deliver { end });
    }

    fn net_send(&mut self, near: u64, bytes: &[u8]) {
        let Some(end) = self.net.ends.get(&near) else { return };
        if end.closed || bytes.is_empty() {
            return;
        }
        let far = end.other;
        let plan = self.plan.net.clone();
        self.note("send", &[near, digest(bytes)]);
        if plan.silence.draw(&mut self.random) {
            self.fall_silent(near);
        }
        if plan.stall.draw(&mut self.random) {
            let stall = self.draw(plan.stall_by);
            self.counts.stalls += 1;
            let now = self.now;
            if let Some(end) = self.net.ends.get_mut(&far) {
                end.last_arrival = end.last_arrival.max(now) + stall;
            }
        }
        let reset = plan.reset.draw(&mut self.random);
        let kept = if reset { self.random.below(bytes.len() as u64) } else { bytes.len() as u64 };
        for (i, (start, len)) in self.cut(kept, plan.max_pieces).into_iter().enumerate() {
            let glued = i > 0 && plan.glue.draw(&mut self.random);
            let piece = &bytes[start as usize..(start + len) as usize];
            if !piece.is_empty() {
                self.net_schedule(far, Item::Bytes(piece.to_vec()), glued);
            }
        }
        if reset {
            self.counts.resets += 1;
            self.note("reset", &[near, kept]);
            self.net_schedule(far, Item::Close, false);
            self.net_schedule(near, Item::Close, false);
        }
    }

    fn net_close(&mut self, near: u64) {
        let Some(end) = self.net.ends.get_mut(&near) else { return };
        if core::mem::replace(&mut end.closed, true) {
            return;
        }
        let (far, node) = (end.other, end.node);
        self.note("close", &[near]);
        self.forget_inbox(node, near);
        self.net_schedule(far, Item::Close, false);
        self.net.ends.remove(&near);
    }

    fn net_reset(&mut self, near: u64) {
        let Some(far) = self.net.ends.get(&near).map(|end| end.other) else { return };
        self.counts.resets += 1;
        self.note("reset", &[near]);
        for end in [near, far] {
            if let Some(end) = self.net.ends.get_mut(&end) {
                end.arriving.clear();
            }
            self.net_schedule(end, Item::Close, false);
        }
    }

    fn fall_silent(&mut self, end: u64) {
        self.counts.silences += 1;
        let Some(other) = self.net.ends.get(&end).map(|end| end.other) else { return };
        for end in [end, other] {
            if let Some(end) = self.net.ends.get_mut(&end) {
                end.silent = true;
                end.arriving.clear();
            }
        }
    }

    /// The oldest thing on its way to an end arrives.
    pub(super) fn deliver(&mut self, id: u64) {
        /// Between two tries over a cut link.
        const RETRY: u64 = 200_000;
        let Some(end) = self.net.ends.get(&id) else { return };
        let (node, other, other_node) = (end.node, end.other, end.other_node);
        if end.silent {
            return;
        }
        if self.link_is_cut(node, other_node) {
            self.schedule(self.now + RETRY, Event::Deliver { end: id });
            return;
        }
        let Some(item) = self.net.ends.get_mut(&id).and_then(|end| end.arriving.pop_front()) else { return };
        let conn = ConnId(id);
        let event = match item {
            Item::Accept { from, port } => {
                let down = self.node(node).down;
                if down && !self.plan.net.crash_closes.draw(&mut self.random) {
                    self.fall_silent(id);
                    return;
                }
                let refused = self.plan.net.refuse.draw(&mut self.random);
                if down || refused || !self.net.listening.contains(&(node, port)) {
                    self.net.ends.remove(&id);
                    self.net_schedule(other, Item::Refuse, false);
                    return;
                }
                self.net_schedule(other, Item::Connect, false);
                NetEvent::Accepted { conn, from, port }
            }
            Item::Connect => NetEvent::Connected { conn },
            Item::Refuse => NetEvent::Refused { conn },
            Item::Bytes(data) => NetEvent::Bytes { conn, data },
            Item::Close => NetEvent::Closed { conn },
        };
        if matches!(event, NetEvent::Refused { .. } | NetEvent::Closed { .. }) {
            self.net.ends.remove(&id);
        }
        self.inform(node, event);
    }

    /// Puts an event into a node's inbox; bytes of one connection that arrive together are read together.
    fn inform(&mut self, node: NodeId, event: NetEvent) {
        let (kind, conn, content) = match &event {
            NetEvent::Accepted { conn, from, .. } => ("accepted", conn, u64::from(from.0)),
            NetEvent::Connected { conn } => ("connected", conn, 0),
            NetEvent::Refused { conn } => ("refused", conn, 0),
            NetEvent::Bytes { conn, data } => ("bytes", conn, digest(data)),
            NetEvent::Closed { conn } => ("closed", conn, 0),
        };
        self.note(kind, &[conn.0, content]);
        self.wake(node);
        let inbox = self.net.inboxes.entry(node).or_default();
        match (inbox.back_mut(), event) {
            (Some(NetEvent::Bytes { conn: last, data: before }), NetEvent::Bytes { conn, data }) if *last == conn => {
                before.extend_from_slice(&data);
            }
            (_, event) => inbox.push_back(event),
        }
    }

    fn forget_inbox(&mut self, node: NodeId, id: u64) {
        let Some(inbox) = self.net.inboxes.get_mut(&node) else { return };
        inbox.retain(|event| match event {
            NetEvent::Accepted { conn, .. }
            | NetEvent::Connected { conn }
            | NetEvent::Refused { conn }
            | NetEvent::Bytes { conn, .. }
            | NetEvent::Closed { conn } => conn.0 != id,
        });
    }

    pub(super) fn crash_net(&mut self, node: NodeId) {
        self.net.listening.retain(|(listener, _)| *listener != node);
        self.net.inboxes.remove(&node);
        let mine: Vec<u64> = self.net.ends.iter().filter(|(_, end)| end.node == node).map(|(&id, _)| id).collect();
        let closes = self.plan.net.crash_closes.draw(&mut self.random);
        for id in mine {
            if closes {
                self.net_close(id);
            } else {
                self.fall_silent(id);
                self.net.ends.remove(&id);
            }
        }
    }
}
