//! Gets what `kv_producer` publishes, by its address and the key: see there.

use std::error::Error;
use std::time::{Duration, Instant};
use towline::Endpoint;

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: kv_consumer ADDRESS, the one that kv_producer prints")?;
    let endpoint = Endpoint::builder().pool_size(64 << 20).build()?;

    // Waits for the key until it is put, at most as long as this.
    let begin = Instant::now();
    let payload = endpoint.get((&address, "request 42"), Duration::from_secs(60))?;
    let took = begin.elapsed();

    for (number, part) in payload.parts().enumerate() {
        let layout = part.layout();
        let values = part.elements::<f32>()?;
        if values.iter().any(|value| *value != number as f32) {
            return Err(format!("{} did not arrive as it was put", layout.name).into());
        }
        println!("{} {:?} of {}: all {}", layout.name, layout.shape, layout.dtype, values[0]);
    }
    let info = payload.info();
    println!("{} bytes by {} in {took:.1?}, connecting included: {}", info.bytes, info.path, info.path_reason);
    Ok(())
}
