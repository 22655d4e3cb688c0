//! Servers for tests: one of our own that does wrong on demand, and nbdkit where it is installed.
#![allow(dead_code, reason = "each test binary uses a part")]
#![expect(unsafe_code, reason = "pushes buffers of tests")]

use farheap_nbd::{Client, Ending, MARK_LEN, NbdBuffer, NbdEnd, NbdQueue, NbdTimes, ServerAddress};
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A small fast generator of test decisions (splitmix64), so that a printed seed repeats a run.
#[derive(Clone, Debug)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.roll() % bound
    }
}

/// A request as a server gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) command: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;

/// Treatment of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// As it should be.
    Answer,
    /// After this number of milliseconds, and later requests after it.
    Slowly(u64),
    /// With an error.
    Refuse(u32),
    /// The connection ends, and nothing is done.
    Hang,
    /// It is done, and the connection ends without an answer.
    DoAndHang,
    /// It is neither done nor answered now; [`Control::carry_out_held`] does it, whatever became of its connection.
    Hold,
    /// It is done now, and done again by [`Control::carry_out_held`].
    Twice,
    /// As it should be, once [`Control::let_go`] was called.
    Await,
    /// An answer for another request.
    WrongCookie,
    /// A data chunk of another length.
    WrongLength,
    /// Bytes that are no answer.
    Garbage,
}

/// Abilities that a server announces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Announced {
    pub(crate) is_chunked: bool,
    pub(crate) is_read_only: bool,
    pub(crate) has_multi_conn: bool,
    pub(crate) size: u64,
}

impl Default for Announced {
    fn default() -> Announced {
        Announced { is_chunked: true, is_read_only: false, has_multi_conn: true, size: 16 << 20 }
    }
}

type Planner = Box<dyn FnMut(&Asked) -> Plan + Send>;

/// What a test changes of a server that runs.
pub(crate) struct Control {
    announced: Announced,
    memory: Mutex<Vec<u8>>,
    planner: Mutex<Planner>,
    held: Mutex<Vec<(u64, Vec<u8>)>>,
    connections: Mutex<HashMap<u64, TcpStream>>,
    is_paused: AtomicBool,
    is_refusing: AtomicBool,
    is_let_go: AtomicBool,
    is_ended: AtomicBool,
    requests: AtomicU64,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Control {
    pub(crate) fn plan(&self, planner: impl FnMut(&Asked) -> Plan + Send + 'static) {
        *lock(&self.planner) = Box::new(planner);
    }

    /// Every request is answered as it should be.
    pub(crate) fn behave(&self) {
        self.plan(|_| Plan::Answer);
    }

    /// Does what was held.
    pub(crate) fn carry_out_held(&self) -> usize {
        let held: Vec<_> = lock(&self.held).drain(..).collect();
        let mut memory = lock(&self.memory);
        for (offset, data) in &held {
            memory[*offset as usize..][..data.len()].copy_from_slice(data);
        }
        held.len()
    }

    /// Forgets what was held: it never comes.
    pub(crate) fn forget_held(&self) {
        lock(&self.held).clear();
    }

    /// Answers nothing, as a process that was stopped.
    pub(crate) fn pause(&self, is_paused: bool) {
        self.is_paused.store(is_paused, Ordering::SeqCst);
    }

    /// Breaks all connections; refuses others, if asked to.
    pub(crate) fn kill(&self, is_refusing: bool) {
        self.is_refusing.store(is_refusing, Ordering::SeqCst);
        for connection in lock(&self.connections).drain() {
            let _ = connection.1.shutdown(Shutdown::Both);
        }
    }

    pub(crate) fn revive(&self) {
        self.is_refusing.store(false, Ordering::SeqCst);
    }

    /// Goes on with the requests that wait for it.
    pub(crate) fn let_go(&self) {
        self.is_let_go.store(true, Ordering::SeqCst);
    }

    pub(crate) fn memory(&self) -> Vec<u8> {
        lock(&self.memory).clone()
    }

    /// Replaces all of what it holds.
    pub(crate) fn set_memory(&self, bytes: Vec<u8>) {
        *lock(&self.memory) = bytes;
    }

    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }

    fn wait_while_paused(&self) {
        while self.is_paused.load(Ordering::SeqCst) && !self.is_ended.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A server of our own, on a thread for each connection.
pub(crate) struct TestServer {
    pub(crate) control: Arc<Control>,
    pub(crate) address: ServerAddress,
    pub(crate) port: u16,
    acceptor: Option<JoinHandle<()>>,
}

impl TestServer {
    pub(crate) fn start(announced: Announced) -> TestServer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let control = Arc::new(Control {
            announced,
            memory: Mutex::new(vec![0; announced.size as usize]),
            planner: Mutex::new(Box::new(|_| Plan::Answer)),
            held: Mutex::default(),
            connections: Mutex::default(),
            is_paused: AtomicBool::new(false),
            is_refusing: AtomicBool::new(false),
            is_let_go: AtomicBool::new(false),
            is_ended: AtomicBool::new(false),
            requests: AtomicU64::new(0),
        });
        let of_acceptor = Arc::clone(&control);
        let acceptor = std::thread::spawn(move || {
            for (number, stream) in (0..).zip(listener.incoming()) {
                let control = Arc::clone(&of_acceptor);
                if control.is_ended.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                {
                    // Known before it is served, or it would outlive the server that is killed meanwhile.
                    let mut connections = lock(&control.connections);
                    if control.is_refusing.load(Ordering::SeqCst) {
                        continue;
                    }
                    connections.insert(number, stream.try_clone().expect("a copy"));
                }
                std::thread::spawn(move || {
                    let _ = serve(&control, stream);
                    if let Some(stream) = lock(&control.connections).remove(&number) {
                        let _ = stream.shutdown(Shutdown::Both);
                    }
                });
            }
        });
        let address = format!("nbd://127.0.0.1:{port}/x").parse().expect("an address");
        TestServer { control, address, port, acceptor: Some(acceptor) }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.control.is_ended.store(true, Ordering::SeqCst);
        self.control.kill(true);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.join().expect("the acceptor");
        }
    }
}

fn number<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The handshake, and then requests until the connection ends.
fn serve(control: &Control, mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    control.wait_while_paused();
    let announced = control.announced;
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    number::<4>(&mut stream)?;
    let answer = |option: u32, kind: u32, data: &[u8]| {
        let head = 0x0003_e889_0455_65a9_u64.to_be_bytes();
        let len = (data.len() as u32).to_be_bytes();
        [&head[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len, data].concat()
    };
    loop {
        number::<8>(&mut stream)?;
        let option = u32::from_be_bytes(number(&mut stream)?);
        let mut data = vec![0; u32::from_be_bytes(number(&mut stream)?) as usize];
        stream.read_exact(&mut data)?;
        if option != 7 {
            let kind = if announced.is_chunked { 1 } else { 1 << 31 | 1 };
            stream.write_all(&answer(option, kind, &[]))?;
            continue;
        }
        let flags = 1
            | 4
            | 32
            | if announced.is_read_only { 2 } else { 0 }
            | if announced.has_multi_conn { 256_u16 } else { 0 };
        let info = [&[0, 0][..], &announced.size.to_be_bytes(), &flags.to_be_bytes()].concat();
        stream.write_all(&answer(option, 3, &info))?;
        stream.write_all(&answer(option, 1, &[]))?;
        break;
    }
    while serve_one(control, &mut stream)? {}
    Ok(())
}

fn serve_one(control: &Control, stream: &mut TcpStream) -> io::Result<bool> {
    let head: [u8; 28] = number(stream)?;
    let field = |at: usize, len: usize| {
        head[at..at + len].iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let asked = Asked {
        command: field(6, 2) as u16,
        cookie: field(8, 8),
        offset: field(16, 8),
        len: field(24, 4) as u32,
    };
    let mut data = vec![0; if asked.command == WRITE { asked.len as usize } else { 0 }];
    stream.read_exact(&mut data)?;
    control.wait_while_paused();
    if asked.command == 2 {
        return Ok(false);
    }
    control.requests.fetch_add(1, Ordering::SeqCst);
    let plan = (lock(&control.planner))(&asked);
    let range = asked.offset as usize..asked.offset as usize + asked.len as usize;
    match plan {
        Plan::Await => {
            while !control.is_let_go.load(Ordering::SeqCst)
                && !control.is_ended.load(Ordering::SeqCst)
            {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Plan::Slowly(ms) => std::thread::sleep(Duration::from_millis(ms)),
        Plan::Refuse(errno) => {
            stream.write_all(&simple(errno, asked.cookie))?;
            return Ok(true);
        }
        Plan::Hang => return Ok(false),
        Plan::Hold | Plan::Twice if asked.command == WRITE => {
            lock(&control.held).push((asked.offset, data.clone()));
            if plan == Plan::Hold {
                return Ok(true);
            }
        }
        Plan::Garbage => {
            stream.write_all(&[0x5a; 64])?;
            return Ok(true);
        }
        _ => {}
    }
    let read = {
        let mut memory = lock(&control.memory);
        if asked.command == WRITE {
            memory[range.clone()].copy_from_slice(&data);
        }
        memory[if asked.command == READ { range } else { 0..0 }].to_vec()
    };
    if plan == Plan::DoAndHang {
        return Ok(false);
    }
    let cookie = asked.cookie ^ if plan == Plan::WrongCookie { 1 << 40 } else { 0 };
    let extra = if plan == Plan::WrongLength { 4096 } else { 0 };
    if asked.command == READ && control.announced.is_chunked {
        // In two chunks, so that both kinds of end are seen.
        let (first, second) = read.split_at(read.len() / 2);
        stream.write_all(&chunk(0, cookie, asked.offset, first.len() + extra, first))?;
        let offset = asked.offset + first.len() as u64;
        stream.write_all(&chunk(1, cookie, offset, second.len(), second))?;
    } else {
        let errno = 0;
        stream.write_all(&[simple(errno, cookie), read].concat())?;
    }
    Ok(true)
}

fn simple(errno: u32, cookie: u64) -> Vec<u8> {
    [&0x6744_6698_u32.to_be_bytes()[..], &errno.to_be_bytes(), &cookie.to_be_bytes()].concat()
}

fn chunk(flags: u16, cookie: u64, offset: u64, len: usize, data: &[u8]) -> Vec<u8> {
    let len = (len as u32 + 8).to_be_bytes();
    let head = [&0x668e_33ef_u32.to_be_bytes()[..], &flags.to_be_bytes(), &1_u16.to_be_bytes()];
    [&head.concat()[..], &cookie.to_be_bytes(), &len, &offset.to_be_bytes(), data].concat()
}

/// nbdkit with a memory of 64 MiB on a Unix socket in `dir`; `None`, after saying so, where it is not installed.
pub(crate) fn nbdkit(dir: &std::path::Path, options: &[&str], plugin: &[&str]) -> Option<Nbdkit> {
    let socket = dir.join("nbd.sock");
    let command = Command::new("nbdkit")
        .arg("--foreground")
        .arg("--unix")
        .arg(&socket)
        .args(options)
        .args(plugin)
        .stdout(Stdio::null())
        .spawn();
    let Ok(child) = command else {
        println!("skipped: nbdkit is not installed");
        return None;
    };
    let address = format!("nbd+unix:///?socket={}", socket.display());
    let server = Nbdkit { child, address: address.parse().expect("an address") };
    let start = Instant::now();
    while std::os::unix::net::UnixStream::connect(&socket).is_err() {
        assert!(start.elapsed() < PATIENCE, "nbdkit does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    Some(server)
}

pub(crate) struct Nbdkit {
    child: Child,
    pub(crate) address: ServerAddress,
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// More than anything takes on a machine that is busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) const QUICK: NbdTimes =
    NbdTimes { connect: Duration::from_secs(20), stall: Duration::from_millis(1500) };
pub(crate) const PATIENT: NbdTimes =
    NbdTimes { connect: Duration::from_secs(20), stall: Duration::from_secs(60) };

/// A client whose tenders run.
pub(crate) fn client(addresses: &[ServerAddress], times: NbdTimes) -> Client {
    let client = Client::connect(addresses, times).expect("connected");
    for at in 0..addresses.len() {
        let tender = client.tender(at, Box::new(|text| println!("{text}")));
        std::thread::spawn(move || tender.run());
    }
    client
}

/// Marks all servers, however long they take.
pub(crate) fn mark(client: &Client) {
    let mut mark = [0x77; MARK_LEN];
    for at in 0..client.servers().count() {
        let start = Instant::now();
        while client.write_to(at, 0, &mut mark).is_err() {
            assert!(start.elapsed() < PATIENCE, "a server does not answer");
        }
    }
    client.set_mark(&mark);
}

/// Pages of a test, aligned or not: what the client does not care about.
pub(crate) struct Page(pub(crate) Vec<u8>);

impl Page {
    pub(crate) fn of(byte: u8, len: usize) -> Page {
        Page(vec![byte; len])
    }

    /// Its bytes in this number of buffers.
    pub(crate) fn buffers(&mut self, count: usize) -> Vec<NbdBuffer> {
        let len = self.0.len() / count;
        let ptr = self.0.as_mut_ptr();
        (0..count).map(|n| NbdBuffer { ptr: ptr.wrapping_add(n * len), len }).collect()
    }
}

/// Pushes a request on a page, and waits for its end.
pub(crate) fn run(queue: &mut NbdQueue, is_read: bool, offset: u64, page: &mut Page) -> Ending {
    push(queue, 7, is_read, offset, page);
    let start = Instant::now();
    let mut end = None;
    while end.is_none() {
        assert!(start.elapsed() < PATIENCE, "a request hangs");
        let mut done = |ended: NbdEnd| {
            let len = page.0.len() as u32;
            assert_eq!(ended, NbdEnd { token: 7, is_read, offset, len, ending: ended.ending });
            end = Some(ended.ending);
        };
        queue.wait(Duration::from_millis(50), &mut done).expect("a wait");
    }
    end.expect("ended")
}

pub(crate) fn push(queue: &mut NbdQueue, token: u64, is_read: bool, offset: u64, page: &mut Page) {
    let buffers = page.buffers(1);
    // SAFETY: tests keep their pages until the queue has reported their end or was dropped.
    assert!(unsafe { queue.push(token, is_read, offset, buffers.into_iter()) }, "room");
}

/// Repeats a request until it is done: the connection may have to be made first.
pub(crate) fn until_done(queue: &mut NbdQueue, is_read: bool, offset: u64, page: &mut Page) {
    let start = Instant::now();
    while run(queue, is_read, offset, page) != Ending::Done {
        assert!(start.elapsed() < PATIENCE, "the server does not come back");
        std::thread::sleep(Duration::from_millis(5));
    }
}
