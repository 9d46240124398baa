//! The KV cache of a request, published for another process: start this, then `kv_consumer` with the address it prints.
//!
//! ```sh
//! cargo run --release --example kv_producer
//! cargo run --release --example kv_consumer -- 127.0.0.1:40000
//! ```

use std::error::Error;
use std::time::Duration;
use towline::{DType, Endpoint, Part};

const LAYERS: u64 = 4;
const TOKENS: u64 = 1024;
const WIDTH: u64 = 1024;

fn main() -> Result<(), Box<dyn Error>> {
    let endpoint = Endpoint::builder().pool_size(64 << 20).build()?;
    println!("{}", endpoint.address());

    // What is published is written in place, in memory of the pool: nothing is copied when it is put.
    let shape = [TOKENS, WIDTH];
    let names: Vec<String> = (0..LAYERS).flat_map(|layer| [format!("{layer}.k"), format!("{layer}.v")]).collect();
    let mut parts = Vec::new();
    for (number, name) in names.iter().enumerate() {
        let mut tensor = endpoint.alloc((TOKENS * WIDTH) as usize * size_of::<f32>())?;
        tensor.elements_mut::<f32>()?.fill(number as f32);
        parts.push(Part::buffer(name, DType::F32, &shape, tensor));
    }

    // A consumer that asks before the payload is there gets it without another round trip.
    endpoint.wait_for_consumers("request 42", 1, Duration::from_secs(60))?;
    endpoint.put("request 42", parts)?;

    // Waits until the consumer has read all of it.
    let left = endpoint.close(Duration::from_secs(60));
    println!("done; {} leases left", left.leases);
    Ok(())
}
