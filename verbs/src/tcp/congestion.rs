//! Congestion controls: which there are, which one a socket starts with, and which streams have which.

use super::chooser::Choices;
use super::sys;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;

/// A congestion control that a stream can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Control {
    /// The system's own choice.
    System,
    /// In every kernel, and allowed to everybody.
    Reno,
    /// In most kernels; everybody may choose it where the system says so.
    Cubic,
}

impl Control {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::System => system(),
            Self::Reno => "reno",
            Self::Cubic => "cubic",
        }
    }

    /// Whether a socket that has had it is paced by timers for life (Linux sets `sk_pacing_status` and never clears it).
    /// Of the controls in the kernel, BBR and its like pace; a name not known is taken to.
    pub(super) fn paces(self) -> bool {
        !matches!(
            self.name(),
            "reno" | "cubic" | "htcp" | "dctcp" | "bic" | "westwood" | "vegas" | "illinois" | "scalable"
        )
    }
}

/// The name of the control that a new socket has.
pub(super) fn system() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| {
        let name = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
        name.map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
    })
}

/// The control that a socket begins with: one that does not pace, if there is one.
pub(super) fn first() -> Control {
    if Control::System.paces() { Control::Reno } else { Control::System }
}

/// Has `socket`, which is not connected yet, begin with [`first`]; if the system refuses, its own choice stands.
pub(super) fn start_unpaced(socket: BorrowedFd<'_>) {
    if first() != Control::System {
        let _refused = sys::set_congestion_control(socket, first().name());
    }
}

/// What a connection of `streams` streams can choose from: the controls that this system has and allows this user, the
/// one that sockets begin with in front. Within one host nothing is lost on the way and nothing queues but at the ends,
/// so one that paces can only be slower there (BBR: two thirds of reno's speed) and is not tried.
pub(super) fn choices(streams: u8, within_host: bool) -> Choices {
    static ALLOWED: OnceLock<Vec<Control>> = OnceLock::new();
    let allowed = ALLOWED.get_or_init(|| {
        let mut controls = vec![first()];
        let any = "127.0.0.1:1".parse().ok().and_then(|address| sys::socket(&address).ok());
        for control in [Control::Cubic, Control::Reno, Control::System] {
            let known = controls.iter().any(|known| known.name() == control.name());
            let allowed =
                any.as_ref().is_some_and(|any| sys::set_congestion_control(any.as_fd(), control.name()).is_ok());
            if !known && (allowed || control == Control::System) {
                controls.push(control);
            }
        }
        controls
    });
    let mut controls = allowed.clone();
    if within_host && !controls[0].paces() {
        controls.retain(|control| !control.paces());
    }
    Choices { controls, streams: how_many, all: streams }
}

/// How many of `all` streams can have `control`: one that paces has the last for itself, as it would spoil the others for
/// whatever comes after it.
fn how_many(control: Control, all: u8) -> u8 {
    let reserved = u8::from(Control::System.paces() && all > 1);
    match control.paces() {
        true => reserved,
        false => all - reserved,
    }
}

/// Which of `all` streams carry data when `count` have `control`, a bit for each.
pub(super) fn carriers(control: Control, count: u8, all: u8) -> u32 {
    if control.paces() && all > 1 { 1 << (all - 1) } else { (1 << count) - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_of_a_control_that_paces_are_nobody_elses() {
        for all in 1..=4 {
            let plain = carriers(Control::Reno, how_many(Control::Reno, all), all);
            assert!(plain != 0 && plain < 1 << all);
            if Control::System.paces() && all > 1 {
                assert_eq!(how_many(Control::System, all), 1);
                assert_eq!(carriers(Control::System, 1, all) & plain, 0);
            }
        }
    }

    #[test]
    fn there_is_a_choice_that_begins_unpaced_and_names_each_control_once() {
        let choices = choices(2, false);
        assert!(choices.controls.len() >= 2 || system() == "reno");
        assert!(!choices.controls[0].paces() || Control::System.paces());
        let names: std::collections::HashSet<_> = choices.controls.iter().map(|control| control.name()).collect();
        assert_eq!(names.len(), choices.controls.len());
        let within_host = super::choices(2, true);
        assert_eq!(within_host.controls[0], choices.controls[0]);
        assert!(within_host.controls.iter().skip(1).all(|control| !control.paces()));
    }
}
