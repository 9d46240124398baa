//! The consumer's calls: get, view, and where from.

use super::{Endpoint, deadline_of};
use crate::engine::{self, GetRequest, Source};
use crate::error::{Subject, printable};
use crate::payload::{Payload, View};
use crate::sys::{self, OwnedBytes};
use crate::{Error, ErrorKind, Result, Ticket};
use std::sync::Arc;
use std::time::Duration;
use towline_control::address::{Address, AddressError};

/// Where a payload is to be had: a ticket, or a peer's address and a key.
#[derive(Debug, Clone)]
pub struct Origin(Result<Source>);

impl From<&Ticket> for Origin {
    fn from(ticket: &Ticket) -> Self {
        Self(Ok(Source::Ticket(Box::new(ticket.clone()))))
    }
}

impl From<Ticket> for Origin {
    fn from(ticket: Ticket) -> Self {
        Self(Ok(Source::Ticket(Box::new(ticket))))
    }
}

impl<P: AsRef<str>, K: AsRef<[u8]>> From<(P, K)> for Origin {
    fn from((peer, key): (P, K)) -> Self {
        let address = parse_address("get", peer.as_ref());
        Self(address.map(|peer| Source::Key { peers: vec![peer], key: key.as_ref().to_vec() }))
    }
}

pub(crate) fn parse_address(operation: &'static str, text: &str) -> Result<Address> {
    text.parse().map_err(|error: AddressError| {
        let why = match error {
            AddressError::Form if !text.contains([':', '@']) => "it has no port".to_owned(),
            AddressError::Form => "it has none of the forms of one".to_owned(),
            other => other.to_string().trim_start_matches("address: ").to_owned(),
        };
        Error::new(operation, ErrorKind::AddressMalformed { text: printable(text.as_bytes()), why })
    })
}

impl Endpoint {
    /// Gets a payload into the pool: named by a ticket, or by `(peer address, key)`, for which it waits if it is not
    /// there yet. `timeout` counts from the call, and includes connecting if the peers are not connected yet.
    ///
    /// A payload is gone when as many consumers have had it as it was put for, one by default; a get that fails does not
    /// use it up.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] at the deadline, and [`ErrorKind::PoolFull`] when the pool had no room until then;
    /// [`ErrorKind::PoolTooSmall`]. [`ErrorKind::Gone`] when the payload is not there any more.
    /// [`ErrorKind::AddressMalformed`], [`ErrorKind::PeerUnreachable`], [`ErrorKind::PeerLost`] and
    /// [`ErrorKind::TransferFailed`] for the way to the peer; [`ErrorKind::PathNotAllowed`]; [`ErrorKind::WrongSecret`]
    /// and its siblings; [`ErrorKind::Closed`]. Each says in its text and in [`ErrorKind`]'s documentation what can be
    /// done and whether the same call can succeed later.
    pub fn get(&self, from: impl Into<Origin>, timeout: Duration) -> Result<Payload> {
        self.run("get", from.into(), timeout, false, None).map(Payload::new)
    }

    /// As [`get`](Self::get), into memory of the caller's own instead of the pool: `destination` must have at least
    /// [`Layout::destination_len`](crate::Layout::destination_len) bytes, and comes back by
    /// [`Payload::into_vec`]. It is given away and not lent, so that it lives until nothing touches it any more, also
    /// when the deadline comes first.
    ///
    /// # Errors
    /// As [`get`](Self::get), and [`ErrorKind::DestinationTooSmall`]. The destination is lost with the error.
    pub fn get_into(&self, from: impl Into<Origin>, destination: Vec<u8>, timeout: Duration) -> Result<Payload> {
        if destination.is_empty() {
            return self.get(from, timeout);
        }
        let own = OwnedBytes::new(destination.into_boxed_slice());
        self.run("get", from.into(), timeout, false, Some(own)).map(Payload::new)
    }

    /// A read-only view of a payload in its producer's memory: same host only, no byte is copied. The payload's memory
    /// stays the producer's until the view is dropped. A view counts as a consumer, as a get does.
    ///
    /// # Errors
    /// As [`get`](Self::get), and [`ErrorKind::PathUnsuitable`] where the path has no views.
    pub fn view(&self, from: impl Into<Origin>, timeout: Duration) -> Result<View> {
        let delivery = self.run("view", from.into(), timeout, true, None)?;
        Ok(View::new(delivery, self.shared().clone()))
    }

    fn run(
        &self,
        name: &'static str,
        from: Origin,
        timeout: Duration,
        view: bool,
        destination: Option<Arc<OwnedBytes>>,
    ) -> Result<engine::Delivery> {
        let shared = self.shared();
        shared.check(name)?;
        let mut source = from.0?;
        let subject = about(&source);
        let started = resolve_names(name, &mut source, shared.boot).and_then(|()| {
            let now = sys::boot_clock();
            let mut request = GetRequest::new(source, deadline_of(now, timeout));
            request.view = view;
            request.destination = destination;
            shared.driver.with(|engine| engine.get(now, request))
        });
        let outcome = started.and_then(|operation| shared.driver.wait(operation, |engine| engine.take(operation)));
        outcome.map_err(|error| error.about_subject(subject))
    }
}

/// What an error of a get is about.
fn about(source: &Source) -> Subject {
    match source {
        Source::Ticket(ticket) => subject(ticket),
        Source::Key { peers, key } => {
            let peers: Vec<_> = peers.iter().map(ToString::to_string).collect();
            Subject { what: named(key), peer: peers.join(", ") }
        }
    }
}

/// What an error about a ticket is about.
pub(super) fn subject(ticket: &Ticket) -> Subject {
    let what = format!("payload {}.{}", ticket.slot, ticket.generation);
    Subject { what, peer: printable(ticket.addresses.join(", ").as_bytes()) }
}

/// A key, for an error.
pub(super) fn named(key: &[u8]) -> String {
    format!("key `{}`", printable(key))
}

/// Host names become addresses here, in the caller's thread, since looking them up may take long.
fn resolve_names(operation: &'static str, source: &mut Source, boot: [u8; 16]) -> Result<()> {
    let look_up =
        |host: &Address| crate::builder::resolve(operation, host).map(|found| found.into_iter().map(Address::Ip));
    match source {
        Source::Key { peers, .. } => {
            let mut resolved = Vec::new();
            for peer in peers.drain(..) {
                match peer {
                    Address::Host(_) => resolved.extend(look_up(&peer)?),
                    other => resolved.push(other),
                }
            }
            *peers = resolved;
        }
        Source::Ticket(ticket) => {
            let (mut resolved, mut failed) = (Vec::new(), None);
            for text in ticket.addresses.drain(..) {
                match text.parse::<Address>() {
                    Ok(host @ Address::Host(_)) => match look_up(&host) {
                        Ok(found) => resolved.extend(found.map(|address| address.to_string())),
                        Err(error) => failed = Some(error),
                    },
                    _ => resolved.push(text),
                }
            }
            ticket.addresses = resolved;
            // On its own host an endpoint may be reached without any.
            if let (Some(error), true) = (failed, ticket.addresses.is_empty() && ticket.boot != boot) {
                return Err(error);
            }
        }
    }
    Ok(())
}
