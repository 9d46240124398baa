//! The command `towline`: shows what this machine offers, and how fast payloads travel between two processes.

mod command;

fn main() -> std::process::ExitCode {
    command::run()
}
