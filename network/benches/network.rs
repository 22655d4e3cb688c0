//! The client beside a bare loop, on the same server.
//!
//! ```text
//! cargo bench -p farheap-nbd --bench network              # a minute
//! cargo bench -p farheap-nbd --bench network -- --test    # does it work? seconds
//! ```
//! The server is nbdkit with a memory of 256 MiB on a Unix socket. The bare loop has one connection, sends a request with
//! one call, and reads replies through a buffer of 256 KiB; it looks at nothing that it need not. Both sides take turns,
//! five rounds of them, values are medians, and a ratio is the median of the rounds' own ratios. What is read is compared
//! with what was written. With parity there are six servers, of which two may be lost; what they are compared with is one
//! more, and for reads the time within which 99 of a hundred end, one at a time. Prints a table and writes
//! `target/figures/network.csv`.
#![expect(unsafe_code, reason = "pushes buffers of its own")]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Dice, Nbdkit, PATIENT, nbdkit, striped};
use farheap_nbd::{Ending, NbdBuffer, NbdEnd, ServerAddress, shake_hands};
use std::fmt::Write as _;
use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const LEN: usize = 16 << 10;
const PLACES: u64 = (128 << 20) / LEN as u64;
const ROUNDS: usize = 5;

struct Row {
    work: String,
    value: f64,
    baseline: &'static str,
    baseline_value: f64,
    ratio: f64,
    goal: Option<f64>,
    unit: &'static str,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The first bytes of the page at a place.
fn number_of(place: u64) -> [u8; 8] {
    place.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_ne_bytes()
}

/// A client as short as it can be.
struct Bare {
    stream: UnixStream,
    replies: BufReader<UnixStream>,
}

impl Bare {
    fn connect(socket: &Path) -> Bare {
        let mut stream = UnixStream::connect(socket).expect("connected");
        shake_hands(&mut stream, "").expect("entered");
        let replies = BufReader::with_capacity(256 << 10, stream.try_clone().expect("a copy"));
        Bare { stream, replies }
    }

    fn send(&mut self, is_read: bool, cookie: u64, place: u64, message: &mut [u8]) {
        message[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
        message[4..8].copy_from_slice(&[0, 0, 0, u8::from(!is_read)]);
        message[8..16].copy_from_slice(&cookie.to_be_bytes());
        message[16..24].copy_from_slice(&(place * LEN as u64).to_be_bytes());
        message[24..28].copy_from_slice(&(LEN as u32).to_be_bytes());
        message[28..36].copy_from_slice(&number_of(place));
        let len = if is_read { 28 } else { 28 + LEN };
        self.stream.write_all(&message[..len]).expect("sent");
    }

    /// Requests a second.
    fn run(&mut self, is_read: bool, depth: usize, count: u64) -> f64 {
        let mut dice = Dice(count);
        let mut message = vec![0; 28 + LEN];
        let mut page = vec![0; LEN];
        let mut places = vec![0; depth];
        let (start, mut sent, mut done) = (Instant::now(), 0, 0);
        for (cookie, place) in (0..).zip(&mut places) {
            *place = dice.below(PLACES);
            self.send(is_read, cookie, *place, &mut message);
            sent += 1;
        }
        while done < count {
            let mut magic = [0; 4];
            self.replies.read_exact(&mut magic).expect("a reply");
            let cookie = if magic == 0x6744_6698_u32.to_be_bytes() {
                let mut rest = [0; 12];
                self.replies.read_exact(&mut rest).expect("a reply");
                assert_eq!(rest[..4], [0; 4], "refused");
                rest[11]
            } else {
                let mut rest = [0; 16];
                self.replies.read_exact(&mut rest).expect("a reply");
                assert_eq!(rest[1], 1, "the last chunk");
                if rest[3] == 1 {
                    self.replies.read_exact(&mut [0; 8]).expect("an offset");
                    self.replies.read_exact(&mut page).expect("data");
                    assert_eq!(page[..8], number_of(places[rest[11] as usize]));
                }
                rest[11]
            };
            done += 1;
            if sent < count {
                places[cookie as usize] = dice.below(PLACES);
                self.send(is_read, cookie.into(), places[cookie as usize], &mut message);
                sent += 1;
            }
        }
        count as f64 / start.elapsed().as_secs_f64()
    }
}

/// The client, with its queue.
struct Ours {
    _client: farheap_nbd::Client,
    queue: farheap_nbd::NbdQueue,
}

impl Ours {
    fn connect(addresses: &[ServerAddress]) -> Ours {
        Ours::of(common::client(addresses, PATIENT))
    }

    fn of(client: farheap_nbd::Client) -> Ours {
        let queue = client.open_queue(64).expect("a queue");
        Ours { _client: client, queue }
    }

    fn push(&mut self, is_read: bool, token: u64, place: u64, page: &mut [u8]) {
        if !is_read {
            page[..8].copy_from_slice(&number_of(place));
        }
        let buffer = NbdBuffer { ptr: page.as_mut_ptr(), len: LEN };
        // SAFETY: pages live until all requests have ended; places of writes in flight are never the same.
        let pushed =
            unsafe { self.queue.push(token, is_read, place * LEN as u64, std::iter::once(buffer)) };
        assert!(pushed);
    }

    /// Gives all places their numbers.
    fn fill(&mut self) {
        let mut page = vec![0; LEN];
        for place in 0..PLACES {
            self.push(false, 0, place, &mut page);
            let mut is_done = false;
            while !is_done {
                let mut done = |end: NbdEnd| is_done = end.ending == Ending::Done;
                self.queue.wait(Duration::from_secs(1), &mut done).expect("a wait");
            }
        }
    }

    /// Microseconds within which 99 of a hundred reads end, one at a time.
    fn p99(&mut self, count: u64) -> f64 {
        let mut dice = Dice(count);
        let mut page = vec![0; LEN];
        let mut times = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let place = dice.below(PLACES);
            let start = Instant::now();
            // As the pager reads: pages of 4 KiB.
            let buffer = NbdBuffer { ptr: page.as_mut_ptr(), len: 4096 };
            let buffers = std::iter::once(buffer);
            // SAFETY: the page lives until the request has ended.
            assert!(unsafe { self.queue.push(0, true, place * LEN as u64, buffers) });
            let mut is_done = false;
            while !is_done {
                let mut done = |end: NbdEnd| is_done = end.ending == Ending::Done;
                self.queue.wait(Duration::from_secs(1), &mut done).expect("a wait");
            }
            times.push(start.elapsed());
            assert_eq!(page[..8], number_of(place));
        }
        times.sort_unstable();
        times[times.len() * 99 / 100].as_secs_f64() * 1e6
    }

    fn run(&mut self, is_read: bool, depth: usize, count: u64) -> f64 {
        let mut dice = Dice(count);
        let mut pages = vec![vec![0; LEN]; depth];
        let mut places = vec![0; depth];
        let (start, mut sent, mut done) = (Instant::now(), 0, 0);
        let mut ended: Vec<u64> = (0..depth as u64).collect();
        while done < count {
            for token in ended.drain(..) {
                if sent < count {
                    let mut place = dice.below(PLACES);
                    while places.contains(&place) {
                        place = dice.below(PLACES);
                    }
                    places[token as usize] = place;
                    self.push(is_read, token, place, &mut pages[token as usize]);
                    sent += 1;
                }
            }
            let mut report = |end: NbdEnd| {
                assert_eq!(end.ending, Ending::Done);
                let token = end.token as usize;
                assert_eq!(pages[token][..8], number_of(places[token]));
                ended.push(end.token);
            };
            self.queue.wait(Duration::from_secs(1), &mut report).expect("a wait");
            done += ended.len() as u64;
        }
        count as f64 / start.elapsed().as_secs_f64()
    }
}

fn compare(
    unit: &'static str,
    work: String,
    goal: Option<f64>,
    baseline: &'static str,
    mut ours: impl FnMut() -> f64,
    mut base: impl FnMut() -> f64,
) -> Row {
    let rounds: Vec<(f64, f64)> =
        (0..ROUNDS).map(|_| (base(), ours())).map(|(b, o)| (o, b)).collect();
    let row = Row {
        work,
        value: median(rounds.iter().map(|round| round.0).collect()),
        baseline,
        baseline_value: median(rounds.iter().map(|round| round.1).collect()),
        ratio: median(rounds.iter().map(|round| round.0 / round.1).collect()),
        goal,
        unit,
    };
    let goal = row.goal.map_or_else(String::new, |goal| format!("goal {goal:.2}"));
    println!(
        "{:<36} {:>9.0} {unit:<3}  {:<12} {:>9.0} {unit:<3}  ratio {:.2} {goal}",
        row.work, row.value, row.baseline, row.baseline_value, row.ratio
    );
    row
}

fn socket_of(server: &Nbdkit) -> String {
    let address = server.address.to_string();
    address.split_once("socket=").expect("a Unix socket").1.to_owned()
}

fn main() {
    let is_test = std::env::args().any(|argument| argument == "--test");
    let count = if is_test { 300 } else { 40_000 };
    let dirs = [(); 7].map(|()| tempfile::tempdir().expect("a directory"));
    let servers: Vec<_> =
        dirs.iter().map_while(|dir| nbdkit(dir.path(), &[], &["memory", "256M"])).collect();
    let [first, second, ..] = &servers[..] else { return };
    let mut bare = Bare::connect(Path::new(&socket_of(first)));
    let mut ours = Ours::connect(std::slice::from_ref(&first.address));
    ours.fill();
    let mut rows = Vec::new();
    for is_read in [true, false] {
        let what = if is_read { "reads" } else { "writes" };
        for depth in [1, 8, 32] {
            let goal = (depth == 32).then_some(0.9);
            let work = format!("{what} of 16 KiB, {depth} at once");
            let ours = || ours.run(is_read, depth, count);
            rows.push(compare("1/s", work, goal, "bare loop", ours, || {
                bare.run(is_read, depth, count)
            }));
        }
    }
    let mut both = Ours::connect(&[first.address.clone(), second.address.clone()]);
    let ours = || both.run(false, 32, count);
    let one = Ours::connect(std::slice::from_ref(&first.address));
    let mut one = one;
    let work = "writes to two copies, 32 at once".to_owned();
    let goal = Some(1.0 / 1.15);
    rows.push(compare("1/s", work, goal, "one server", ours, || one.run(false, 32, count)));
    // Not the one that is measured beside them: neither would find what it wrote.
    let addresses: Vec<_> = servers[1..].iter().map(|server| server.address.clone()).collect();
    let mut parity = Ours::of(striped(&addresses, 2, PATIENT));
    parity.fill();
    one.fill();
    for depth in [1, 32] {
        let work = format!("writes with parity 4+2, {depth} at once");
        let ours = || parity.run(false, depth, count);
        rows.push(compare("1/s", work, None, "one server", ours, || one.run(false, depth, count)));
    }
    let work = "reads of 4 KiB with parity 4+2, p99".to_owned();
    let ours = || parity.p99(count);
    rows.push(compare("us", work, Some(1.2), "one server", ours, || one.p99(count)));
    let mut text = "work,value,unit,baseline,baseline_value,ratio,goal\n".to_owned();
    for Row { work, value, baseline, baseline_value, ratio, goal, unit } in &rows {
        let (work, goal) =
            (work.replace(',', ";"), goal.map_or_else(String::new, |goal| format!("{goal:.4}")));
        writeln!(text, "{work},{value:.4},{unit},{baseline},{baseline_value:.4},{ratio:.4},{goal}")
            .expect("a string takes any text");
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let folder = root.join(if is_test { "target/figures/smoke" } else { "target/figures" });
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("network.csv"), text).expect("written");
    println!("written: network.csv in {}", folder.display());
}
