//! Whom a link's peer can be believed to be, and for whom is counted what it holds.
//!
//! Every greeting says which endpoint its sender is, and nothing proves it. What does:
//!
//! | proof | good for |
//! |---|---|
//! | the secret: without it nobody comes as far as a greeting | whatever the peer says |
//! | a Unix socket whose other end runs as this endpoint's own user, by the kernel's word | whatever the peer says |
//! | that we dialled the address which a ticket, or the caller, gave | gets that name the same address |
//!
//! A link that has none of these carries what it was granted, and the gets of its own peer. Gets of this endpoint go over
//! links that are proven for them alone, and a lease is closed and renewed over the link that it was granted on, or over
//! another whose peer is known to be the same endpoint (I4, I14).

use super::Engine;
use super::grants::Grant;
use super::link::{Account, Holding, Link, LinkId, Target, Transport};
use towline_control::address::Address;
use towline_control::session::Role;

impl Engine {
    /// Whether the driver may use a connection over `transport` for this link: somebody else's process may have taken the
    /// name of an endpoint that is gone, or that never had one. If not, the driver tries the next way there is.
    #[must_use]
    pub fn may_connect(&self, id: LinkId, transport: Transport) -> bool {
        let named = self.links.get(&id).is_some_and(|link| link.target.incarnation.is_some());
        !named || !transport.is_unix() || transport.is_own_user() || self.config.secret.is_some()
    }

    /// Whether the peer of `link` is who it says.
    pub(super) fn is_vouched_for(&self, link: &Link) -> bool {
        self.config.secret.is_some() || link.transport.is_some_and(Transport::is_own_user)
    }

    /// Whether `link` is known to lead to `target`, if its peer says so.
    pub(super) fn leads_to(&self, link: &Link, target: &Target) -> bool {
        let dialled = || match link.transport {
            Some(Transport::Tcp { peer }) => {
                target.addresses.iter().any(|address| matches!(address, Address::Ip(address) if *address == peer))
            }
            Some(Transport::Unix { .. }) => target.unix.is_some() && target.unix == link.target.unix,
            None => false,
        };
        self.is_vouched_for(link) || (link.role == Role::Initiator && dialled())
    }

    /// Whether what the peer of link `id` says of the lease is its holder's word.
    pub(super) fn speaks_for(&self, id: LinkId, grant: &Grant) -> bool {
        grant.link == id
            || self
                .links
                .get(&id)
                .is_some_and(|link| link.incarnation() == Some(grant.peer) && self.is_vouched_for(link))
    }

    /// For whom is counted what the peer of a link holds here.
    pub(super) fn account_of(&self, link: &Link) -> Option<Account> {
        let incarnation = link.incarnation()?;
        match link.transport? {
            _ if self.is_vouched_for(link) => Some(Account::Endpoint(incarnation)),
            Transport::Unix { user, .. } => Some(Account::User(user)),
            Transport::Tcp { peer } => Some(Account::at(peer.ip())),
        }
    }

    /// What is held here for `account`.
    pub(super) fn holding(&mut self, account: Account) -> &mut Holding {
        self.holdings.entry(account).or_default()
    }

    pub(super) fn lease_over(&mut self, account: Account, weight: usize) {
        self.let_go(account, |holding| holding.leases -= weight);
    }

    pub(super) fn waiting_over(&mut self, account: Account, gets: usize) {
        self.let_go(account, |holding| holding.waiting -= gets);
    }

    fn let_go(&mut self, account: Account, change: impl FnOnce(&mut Holding)) {
        if let Some(holding) = self.holdings.get_mut(&account) {
            change(holding);
            if holding.leases == 0 && holding.waiting == 0 {
                self.holdings.remove(&account);
            }
        }
    }
}
