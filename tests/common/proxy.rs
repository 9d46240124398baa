//! A meddling network: a TCP relay that a producer advertises instead of itself, and that holds data back, cuts
//! connections, and remembers what passed.

use super::LONG;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use towline_control::preface::{Preface, Purpose};

/// The relay. Dropping it cuts all connections.
#[derive(Debug)]
pub struct Proxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    target: Option<SocketAddr>,
    /// Bytes of data connections that may still pass from the producer to the consumer.
    data_budget: u64,
    /// Relays that have data in hand and no budget for it.
    held: usize,
    /// Whether control connections are held back, in both directions.
    holding_control: bool,
    /// Whether new connections are refused by closing them.
    refusing: bool,
    /// Whether the next data connection is led on only after the one that comes after it.
    overtaking: bool,
    overtaken: bool,
    sockets: Vec<TcpStream>,
    /// What passed on control connections, both directions.
    control: Vec<u8>,
    /// What passed on data connections from the producer to the consumer, in bytes.
    data: u64,
    connections: usize,
    ended: bool,
}

impl Default for State {
    fn default() -> Self {
        Self {
            target: None,
            data_budget: u64::MAX,
            held: 0,
            holding_control: false,
            refusing: false,
            overtaking: false,
            overtaken: false,
            sockets: Vec::new(),
            control: Vec::new(),
            data: 0,
            connections: 0,
            ended: false,
        }
    }
}

impl Proxy {
    /// A relay; connections to it wait until it has a [`target`](Self::target).
    #[track_caller]
    pub fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let accepting = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { continue };
                if accepting.lock().ended {
                    return;
                }
                let shared = accepting.clone();
                std::thread::spawn(move || shared.serve(stream));
            }
        });
        Self { address, shared }
    }

    /// Where connections lead from now on: an endpoint's own port.
    pub fn target(&self, address: SocketAddr) {
        self.shared.lock().target = Some(address);
        self.shared.changed.notify_all();
    }

    /// Lets `bytes` more of data pass to the consumer and holds back what follows.
    pub fn hold_data_after(&self, bytes: u64) {
        self.shared.lock().data_budget = bytes;
        self.shared.changed.notify_all();
    }

    /// Waits until data is held back.
    #[track_caller]
    pub fn wait_until_held(&self) {
        let state = self.shared.lock();
        let (state, _) = self.shared.changed.wait_timeout_while(state, LONG, |state| state.held == 0).unwrap();
        assert!(state.held > 0, "no data came to be held back");
    }

    /// Lets everything pass.
    pub fn release(&self) {
        self.hold_data_after(u64::MAX);
    }

    /// Holds back what passes on control connections, or lets it pass.
    pub fn hold_control(&self, holding: bool) {
        self.shared.lock().holding_control = holding;
        self.shared.changed.notify_all();
    }

    /// Breaks every connection there is.
    pub fn cut(&self) {
        for socket in self.shared.lock().sockets.drain(..) {
            let _already = socket.shutdown(Shutdown::Both);
        }
        self.shared.changed.notify_all();
    }

    /// Whether new connections are closed at once.
    pub fn refuse(&self, refusing: bool) {
        self.shared.lock().refusing = refusing;
    }

    /// Has the next data connection overtaken by the one that is made after it.
    pub fn let_overtake(&self) {
        self.shared.lock().overtaking = true;
    }

    /// All that passed on control connections.
    pub fn control_bytes(&self) -> Vec<u8> {
        self.shared.lock().control.clone()
    }

    /// Bytes of data that passed to the consumer.
    pub fn data_bytes(&self) -> u64 {
        self.shared.lock().data
    }

    /// Connections that were made through it.
    pub fn connections(&self) -> usize {
        self.shared.lock().connections
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.release();
        self.cut();
        let _wakes_the_accepting_thread = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn serve(self: Arc<Self>, mut client: TcpStream) {
        let target = {
            let state = self.lock();
            let (mut state, _) =
                self.changed.wait_timeout_while(state, LONG, |state| state.target.is_none() && !state.ended).unwrap();
            if state.refusing {
                return;
            }
            state.connections += 1;
            state.target
        };
        let Some(target) = target else { return };
        let mut preface = [0; Preface::LEN];
        if client.read_exact(&mut preface).is_err() {
            return;
        }
        let data = matches!(Preface::decode(&preface), Ok(Preface { purpose: Purpose::Data { .. } }));
        if data {
            self.overtake();
        }
        let Ok(mut server) = TcpStream::connect(target) else { return };
        for socket in [&client, &server] {
            socket.set_nodelay(true).unwrap();
            self.lock().sockets.push(socket.try_clone().unwrap());
        }
        if server.write_all(&preface).is_err() {
            return;
        }
        if data {
            self.lock().overtaken = true;
            self.changed.notify_all();
        }
        let (to_server, from_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let shared = self.clone();
        std::thread::spawn(move || shared.pump(from_client, to_server, data, false));
        self.pump(server, client, data, data);
    }

    /// The first data connection waits here for the second, if that was asked for.
    fn overtake(&self) {
        let mut state = self.lock();
        if std::mem::take(&mut state.overtaking) {
            state.overtaken = false;
            while !state.overtaken && !state.ended {
                state = self.changed.wait(state).unwrap();
            }
        }
    }

    fn pump(&self, mut from: TcpStream, mut to: TcpStream, data: bool, budgeted: bool) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            let mut rest = &buffer[..len];
            if !data {
                let mut state = self.lock();
                while state.holding_control && !state.ended {
                    state = self.changed.wait(state).unwrap();
                }
                state.control.extend_from_slice(rest);
            }
            while !rest.is_empty() {
                let step = if budgeted { self.take_budget(rest.len()) } else { rest.len() };
                if to.write_all(&rest[..step]).is_err() {
                    return;
                }
                rest = &rest[step..];
            }
        }
        let _already = to.shutdown(Shutdown::Write);
    }

    /// How many of `len` bytes may pass, after waiting until some may.
    fn take_budget(&self, len: usize) -> usize {
        let mut state = self.lock();
        if state.data_budget == 0 {
            state.held += 1;
            self.changed.notify_all();
            while state.data_budget == 0 && !state.ended {
                state = self.changed.wait(state).unwrap();
            }
            state.held -= 1;
        }
        let step = if state.ended { len } else { len.min(state.data_budget as usize) };
        if state.data_budget != u64::MAX {
            state.data_budget -= (step as u64).min(state.data_budget);
        }
        state.data += step as u64;
        step
    }
}
