//! The command's subcommands, and how they end.

mod args;
mod bench;
mod devices;
mod machine;
mod sys;

use args::Command;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::process::ExitCode;

/// Why a command ends without having done what was asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Failure {
    /// It was tried and failed: exit code 1.
    Failed(String),
    /// Wrong usage, or this machine doesn't have what was asked for; nothing was run: exit code 2.
    Refused(String),
}

impl Failure {
    /// A failure of `what` because of `why`.
    pub(crate) fn failed(what: impl fmt::Display, why: impl fmt::Display) -> Self {
        Self::Failed(format!("{what}: {why}"))
    }

    /// The same failure, said to be of `what`.
    pub(crate) fn within(self, what: impl fmt::Display) -> Self {
        match self {
            Self::Failed(why) => Self::Failed(format!("{what}: {why}")),
            Self::Refused(why) => Self::Refused(format!("{what}: {why}")),
        }
    }

    /// This failure and another; together they are refused only if both are.
    pub(crate) fn and(self, other: &Self) -> Self {
        let text = format!("{self}; {other}");
        match (self, other) {
            (Self::Refused(_), Self::Refused(_)) => Self::Refused(text),
            _ => Self::Failed(text),
        }
    }

    fn code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Refused(_) => 2,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(why) | Self::Refused(why) => f.write_str(why),
        }
    }
}

/// Runs the command that the arguments name.
pub(crate) fn run() -> ExitCode {
    // Not one of the commands that people are told of: the bench starts its second process by it.
    let outcome = if std::env::args_os().nth(1).is_some_and(|word| word == bench::WORKER) {
        bench::work::<bench::Transport>()
    } else {
        match args::parse().map(|cli| cli.command) {
            Ok(Command::Bench(args)) => bench::run::<bench::Transport>(&args),
            Ok(Command::Devices) => devices::run(),
            Err(code) => return code,
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("towline: {failure}");
            ExitCode::from(failure.code())
        }
    }
}
