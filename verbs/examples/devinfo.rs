//! What RDMA devices this machine has, as `ibv_devinfo` tells it, and what towline makes of them.
//!
//! ```text
//! cargo run -p towline-verbs --example devinfo [NAME...]
//! ```
//!
//! Exit code 1 where there is nothing, with what is missing: the library, the kernel's part, or a device.

use std::process::ExitCode;
use towline_verbs::ibv::IbvProvider;
use towline_verbs::{Capabilities, Provider};

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    match devinfo(&wanted) {
        Ok(0) => {
            println!("no device of that name");
            ExitCode::FAILURE
        }
        Ok(_) => ExitCode::SUCCESS,
        Err(why) => {
            println!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the ports, and what a device can do that can be opened. The number of ports.
fn devinfo(wanted: &[String]) -> Result<usize, Box<dyn std::error::Error>> {
    // Every port of every device, also those that can't be used: their state, addresses, and why not.
    let ports = IbvProvider::survey()?;
    let provider = IbvProvider::new()?;
    let mut shown = 0;
    for port in ports.iter().filter(|port| wanted.is_empty() || wanted.contains(&port.device)) {
        shown += 1;
        println!("{} port {}", port.device, port.number);
        println!("    state        {}", port.state);
        println!("    link layer   {}", port.link_layer);
        println!("    MTU          {} bytes", port.mtu);
        for gid in &port.gids {
            println!("    GID {:<8} {} ({})", gid.index, gid.gid, gid.kind);
        }
        match &port.usable {
            Err(error) => println!("    not usable   {error}"),
            Ok(gid_index) => {
                println!("    used         GID {gid_index}");
                // Opening a device asks it what it can do: nothing of this is assumed anywhere.
                let device = provider.open(&port.device)?;
                capabilities(&device.info().capabilities);
            }
        }
    }
    Ok(shown)
}

fn capabilities(can: &Capabilities) {
    println!("    messages     up to {} bytes; cut to {} bytes", can.max_message_size, can.preferred_chunk);
    println!("    requests     {} to send, {} receives a queue pair", can.max_send_wr, can.max_recv_wr);
    println!("    slices       {} a request", can.max_sge);
    println!("    completions  {} a queue", can.max_cqe);
    let windows = if can.scoped_keys { "type 2B: a key for each lease" } else { "none: a key for each region" };
    println!("    windows      {windows}");
}
