//! Servers for tests: one of our own that does wrong on demand, and nbdkit where it is installed.
#![allow(dead_code, reason = "each test binary uses a part")]
#![expect(unsafe_code, reason = "pushes buffers of tests")]

use farheap_nbd::{Client, Ending, MARK_LEN, NbdBuffer, NbdEnd, NbdQueue, NbdTimes, ServerAddress};
use std::collections::{HashMap, VecDeque};
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
pub(crate) const TRIM: u16 = 4;

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
    /// Half of the answer, and the rest once [`Control::let_go`] was called.
    Half,
    /// Chunks of this answer come between and after those of later ones.
    Later,
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
    has_sent_half: AtomicBool,
    is_ended: AtomicBool,
    requests: AtomicU64,
    /// Connections that were made, and how many of the first of them are not read any more.
    accepted: AtomicU64,
    deaf: AtomicU64,
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

    /// Neither reads nor answers on the connections that there are, and keeps them.
    pub(crate) fn turn_deaf(&self) {
        self.deaf.store(self.accepted.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Goes on with the requests that wait for it.
    pub(crate) fn let_go(&self) {
        self.is_let_go.store(true, Ordering::SeqCst);
    }

    fn wait_until_let_go(&self) {
        let is_over =
            || self.is_let_go.load(Ordering::SeqCst) || self.is_ended.load(Ordering::SeqCst);
        while !is_over() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// True if half of an answer was sent.
    pub(crate) fn has_sent_half(&self) -> bool {
        self.has_sent_half.load(Ordering::SeqCst)
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

    /// Waits while the server is stopped; for ever, while it is deaf on this connection.
    fn wait_while_paused(&self, connection: u64) {
        let is_deaf = || connection < self.deaf.load(Ordering::SeqCst);
        while (self.is_paused.load(Ordering::SeqCst) || is_deaf())
            && !self.is_ended.load(Ordering::SeqCst)
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Answers that are sent later, in parts: those of one answer in order.
#[derive(Default)]
struct LateAnswers {
    answers: Vec<VecDeque<Vec<u8>>>,
    dice: u64,
}

impl LateAnswers {
    const MOST: usize = 6;

    /// Sends them all, in any order, unless more may be added to them.
    fn send_if_due(&mut self, stream: &mut TcpStream) -> io::Result<()> {
        if self.answers.is_empty() {
            return Ok(());
        }
        stream.set_read_timeout(Some(Duration::from_millis(3)))?;
        let has_more = stream.peek(&mut [0]).is_ok_and(|count| count > 0);
        stream.set_read_timeout(None)?;
        let mut dice = Dice(self.dice);
        let rest = if has_more { LateAnswers::MOST } else { 0 };
        while self.answers.len() > rest {
            let at = dice.below(self.answers.len() as u64) as usize;
            if let Some(part) = self.answers[at].pop_front() {
                stream.write_all(&part)?;
            }
            if self.answers[at].is_empty() {
                self.answers.remove(at);
            }
        }
        self.dice = dice.roll();
        Ok(())
    }
}

/// A network between a client and a server, on threads of its own, which can be cut.
pub(crate) struct Network {
    cuts: Arc<NetworkCuts>,
    port: u16,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct NetworkCuts {
    is_cut: AtomicBool,
    is_ended: AtomicBool,
    /// Number of cuts after which nothing came through that had been sent before.
    drops: AtomicU64,
}

impl Network {
    fn start(server: u16) -> Network {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let cuts = Arc::new(NetworkCuts::default());
        let of_acceptor = Arc::clone(&cuts);
        let acceptor = std::thread::spawn(move || {
            for client in listener.incoming() {
                if of_acceptor.is_ended.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(client) = client else { continue };
                let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else { continue };
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let [from, to] = [from, to].map(|stream| stream.try_clone().expect("a copy"));
                    let cuts = Arc::clone(&of_acceptor);
                    std::thread::spawn(move || cuts.pass_on(from, to));
                }
            }
        });
        Network { cuts, port, acceptor: Some(acceptor) }
    }

    /// Nothing comes through, in either direction.
    pub(crate) fn cut(&self) {
        self.cuts.is_cut.store(true, Ordering::SeqCst);
    }

    /// Repairs a cut: what was sent before and meanwhile comes through, also for connections that have ended, or is gone.
    pub(crate) fn repair(&self, is_gone: bool) {
        self.cuts.drops.fetch_add(u64::from(is_gone), Ordering::SeqCst);
        self.cuts.is_cut.store(false, Ordering::SeqCst);
    }
}

impl NetworkCuts {
    fn pass_on(&self, mut from: TcpStream, mut to: TcpStream) {
        let _ = to.set_nodelay(true);
        let mut bytes = vec![0; 64 << 10];
        loop {
            let count = from.read(&mut bytes).unwrap_or(0);
            let drops = self.drops.load(Ordering::SeqCst);
            while self.is_cut.load(Ordering::SeqCst) && !self.is_ended.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let is_dropped = drops != self.drops.load(Ordering::SeqCst);
            if count == 0 || is_dropped || to.write_all(&bytes[..count]).is_err() {
                let how = if is_dropped { Shutdown::Both } else { Shutdown::Write };
                let _ = to.shutdown(how);
                if is_dropped {
                    let _ = from.shutdown(how);
                }
                return;
            }
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.cuts.is_ended.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.join().expect("the acceptor");
        }
    }
}

/// A server of our own, on a thread for each connection.
pub(crate) struct TestServer {
    pub(crate) control: Arc<Control>,
    pub(crate) address: ServerAddress,
    pub(crate) port: u16,
    /// Between it and its clients.
    pub(crate) network: Option<Network>,
    acceptor: Option<JoinHandle<()>>,
}

impl TestServer {
    /// Starts one behind a network that can be cut.
    pub(crate) fn start_apart(announced: Announced) -> TestServer {
        let mut server = TestServer::start(announced);
        let network = Network::start(server.port);
        server.address = format!("nbd://127.0.0.1:{}/x", network.port).parse().expect("an address");
        server.network = Some(network);
        server
    }

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
            has_sent_half: AtomicBool::new(false),
            is_ended: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            accepted: AtomicU64::new(0),
            deaf: AtomicU64::new(0),
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
                    control.accepted.store(number + 1, Ordering::SeqCst);
                }
                std::thread::spawn(move || {
                    let _ = serve(&control, stream, number);
                    if let Some(stream) = lock(&control.connections).remove(&number) {
                        let _ = stream.shutdown(Shutdown::Both);
                    }
                });
            }
        });
        let address = format!("nbd://127.0.0.1:{port}/x").parse().expect("an address");
        TestServer { control, address, port, network: None, acceptor: Some(acceptor) }
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
fn serve(control: &Control, mut stream: TcpStream, connection: u64) -> io::Result<()> {
    stream.set_nodelay(true)?;
    control.wait_while_paused(connection);
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
    let mut late = LateAnswers { dice: connection, ..LateAnswers::default() };
    while serve_one(control, &mut stream, connection, &mut late)? {
        late.send_if_due(&mut stream)?;
        control.wait_while_paused(connection);
    }
    Ok(())
}

fn serve_one(
    control: &Control,
    stream: &mut TcpStream,
    connection: u64,
    late: &mut LateAnswers,
) -> io::Result<bool> {
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
    // What is trimmed is zeros.
    let is_change = matches!(asked.command, WRITE | TRIM);
    let mut data = vec![0; if is_change { asked.len as usize } else { 0 }];
    if asked.command == WRITE {
        stream.read_exact(&mut data)?;
    }
    control.wait_while_paused(connection);
    if asked.command == 2 {
        return Ok(false);
    }
    control.requests.fetch_add(1, Ordering::SeqCst);
    let plan = (lock(&control.planner))(&asked);
    let range = asked.offset as usize..asked.offset as usize + asked.len as usize;
    match plan {
        Plan::Await => control.wait_until_let_go(),
        Plan::Slowly(ms) => std::thread::sleep(Duration::from_millis(ms)),
        Plan::Refuse(errno) => {
            stream.write_all(&simple(errno, asked.cookie))?;
            return Ok(true);
        }
        Plan::Hang => return Ok(false),
        Plan::Hold | Plan::Twice if is_change => {
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
        if is_change {
            memory[range.clone()].copy_from_slice(&data);
        }
        memory[if asked.command == READ { range } else { 0..0 }].to_vec()
    };
    if plan == Plan::DoAndHang {
        return Ok(false);
    }
    let cookie = asked.cookie ^ if plan == Plan::WrongCookie { 1 << 40 } else { 0 };
    let extra = if plan == Plan::WrongLength { 4096 } else { 0 };
    let parts = if asked.command == READ && control.announced.is_chunked {
        // In two chunks, so that both kinds of end are seen.
        let (first, second) = read.split_at(read.len() / 2);
        let offset = asked.offset + first.len() as u64;
        let second = chunk(1, cookie, offset, second.len(), second);
        [chunk(0, cookie, asked.offset, first.len() + extra, first), second].into()
    } else {
        VecDeque::from([[simple(0, cookie), read].concat()])
    };
    if plan == Plan::Later {
        late.answers.push(parts);
        return Ok(true);
    }
    for (n, part) in parts.iter().enumerate() {
        if plan == Plan::Half && n > 0 {
            control.has_sent_half.store(true, Ordering::SeqCst);
            control.wait_until_let_go();
        }
        stream.write_all(part)?;
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
    NbdTimes { connect: Duration::from_secs(60), stall: Duration::from_millis(1500) };
pub(crate) const PATIENT: NbdTimes =
    NbdTimes { connect: Duration::from_secs(60), stall: Duration::from_secs(60) };

/// A client whose tenders run.
pub(crate) fn client(addresses: &[ServerAddress], times: NbdTimes) -> Client {
    tended(Client::connect(addresses, times).expect("connected"))
}

/// A client of servers that hold pages with parity.
pub(crate) fn striped(addresses: &[ServerAddress], parity: usize, times: NbdTimes) -> Client {
    tended(Client::connect_striped(addresses, parity, times).expect("connected"))
}

fn tended(client: Client) -> Client {
    for at in 0..client.tenders() {
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
    end_of(queue, is_read, offset, page)
}

/// Waits for the end of request 7, the only one in flight.
pub(crate) fn end_of(queue: &mut NbdQueue, is_read: bool, offset: u64, page: &Page) -> Ending {
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

/// Repeats a request until it is done: the connection may have to be made first. A write that is lost on a connection that
/// breaks bars its place for ever: read before.
pub(crate) fn until_done(queue: &mut NbdQueue, is_read: bool, offset: u64, page: &mut Page) {
    let start = Instant::now();
    while run(queue, is_read, offset, page) != Ending::Done {
        assert!(start.elapsed() < PATIENCE, "the server does not come back");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads as a signal handler does.
pub(crate) fn read_now(client: &Client, offset: u64, page: &mut Page) -> Result<(), i32> {
    // SAFETY: the page is the caller's alone.
    unsafe { client.read_now(offset, page.0.as_mut_ptr(), page.0.len()) }
}
