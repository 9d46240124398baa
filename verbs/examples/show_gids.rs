//! The addresses of all RDMA ports, one a line, with the one that is used unless another is named marked by a star.
//!
//! ```text
//! cargo run -p towline-verbs --example show_gids
//! ```
//!
//! The first three columns, joined by colons, are what names a port and GID to towline: `mlx5_0:1:3`.

use std::process::ExitCode;
use towline_verbs::ibv::{IbvProvider, PortName};

fn main() -> ExitCode {
    let ports = match IbvProvider::survey() {
        Ok(ports) => ports,
        Err(absence) => {
            println!("{absence}");
            return ExitCode::FAILURE;
        }
    };
    println!("{:<16} {:>4} {:>5}   {:<40} {:<12} name", "device", "port", "index", "GID", "type");
    for port in &ports {
        for gid in &port.gids {
            let index = u8::try_from(gid.index).ok();
            let is_used = index.is_some() && port.usable.as_ref().ok().copied() == index;
            let name = PortName { device: port.device.clone(), port: Some(port.number), gid_index: index };
            let star = if is_used { '*' } else { ' ' };
            println!(
                "{:<16} {:>4} {:>5} {star} {:<40} {:<12} {name}",
                port.device,
                port.number,
                gid.index,
                gid.gid.to_string(),
                gid.kind
            );
        }
        if let Err(why) = &port.usable {
            println!("{:<16} {:>4}         not usable: {why}", port.device, port.number);
        }
    }
    ExitCode::SUCCESS
}
