//! How long a get of a small payload takes that is there, beside a bare ping-pong over TCP of the same two processes.
//!
//! ```sh
//! cargo run --release --example get_latency -- tcp
//! cargo run --release --example get_latency -- rdma mlx5_0
//! ```

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use towline::{DType, Endpoint, Part, Path, Paths, PutOptions};

const BYTES: usize = 4096;
const ROUNDS: usize = 500;
/// Rounds at the begin that are not counted: connections are made in the first.
const COLD: usize = 50;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// An endpoint for one path, and on one device where that is named.
fn endpoint(arguments: &[String]) -> Outcome<Endpoint> {
    let path = match arguments.first().map(String::as_str) {
        Some("rdma") => Path::Rdma,
        Some("tcp") => Path::Tcp,
        Some("shm") => Path::Shm,
        _ => return Err("usage: get_latency tcp|shm|rdma [DEVICE]".into()),
    };
    let builder = Endpoint::builder().pool_size(1 << 20).allow_paths(Paths::only(path));
    Ok(match arguments.get(1) {
        Some(device) => builder.rdma_device(device).build()?,
        None => builder.build()?,
    })
}

/// The other process: keeps one payload, and answers pings.
fn serve(arguments: &[String]) -> Outcome<()> {
    let endpoint = endpoint(arguments)?;
    let data = vec![7; BYTES];
    let part = Part::bytes("", DType::U8, &[BYTES as u64], &data);
    endpoint.put_with("key", [part], &PutOptions::new().consumers(u32::MAX))?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}\n{}", endpoint.address(), listener.local_addr()?);
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 {
        stream.write_all(&byte)?;
    }
    Ok(())
}

/// The median of how long `work` takes, in microseconds.
fn median_us(mut work: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    let mut times = vec![];
    for round in 0..COLD + ROUNDS {
        let begin = Instant::now();
        work()?;
        if round >= COLD {
            times.push(begin.elapsed());
        }
    }
    times.sort_unstable();
    Ok(times[ROUNDS / 2].as_secs_f64() * 1e6)
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "serve") {
        return serve(&arguments[1..]);
    }
    let endpoint = endpoint(&arguments)?;
    let mut other =
        Command::new(std::env::current_exe()?).arg("serve").args(&arguments).stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(other.stdout.take().ok_or("no output")?).lines();
    let mut line = || lines.next().ok_or("the other process ended")?.map_err(Box::<dyn Error>::from);
    let (address, pings) = (line()?, line()?);
    let mut stream = TcpStream::connect(pings)?;
    stream.set_nodelay(true)?;
    let mut byte = [1];
    let ping = median_us(|| Ok(stream.write_all(&byte).and_then(|()| stream.read_exact(&mut byte))?))?;
    let get = median_us(|| {
        let payload = endpoint.get((&address, "key"), Duration::from_secs(5))?;
        let bytes = payload.parts().next().map_or(0, |part| part.bytes().len());
        (bytes == BYTES).then_some(()).ok_or_else(|| "the payload is not whole".into())
    })?;
    drop(stream); // which ends the other process
    other.wait()?;
    println!("get {get:.1} us, ping-pong {ping:.1} us");
    Ok(())
}
