//! Random schedules of faults, from printed seeds: right bytes, or a loss that is seen; never a hang.
//!
//! A schedule writes and reads pages by a map of places as the pager has one: a page that is written gets a new place,
//! the old one is free when the write is done, a place whose write is late is given up. Meanwhile servers are killed,
//! stopped, cut off, deaf, slow, they refuse, answer in another order, hold writes back and carry them out when it is too
//! late, and begin anew with nothing or with what they had some time ago. At the end all is well again, and every page is read.
//!
//! Faults of the first kinds lose nothing, and neither does a server that begins anew while another has all, or there is
//! parity: there each page must come back. Else a page may be lost, which its user sees by its hash.

mod common;

use common::{Announced, Dice, Page, Plan, READ, TestServer, client, push, striped};
use farheap_nbd::{Client, Ending, NbdEnd, NbdQueue, NbdTimes};
use std::collections::HashMap;
use std::time::{Duration, Instant};

const SIZE: u64 = 4 << 20;
const PAGE: usize = 8192;
const PAGES: u64 = 24;
const STEPS: u64 = 80;
const TIMES: NbdTimes =
    NbdTimes { connect: Duration::from_millis(300), stall: Duration::from_millis(60) };
/// A request takes no longer, on a machine that is busy.
const NEVER_LONGER: Duration = Duration::from_secs(60);
/// Places that are used: of all layouts there are as many.
const PLACES: u64 = 400;
/// Schedules of a run. `FARHEAP_NETWORK_SCHEDULES` is another number of them, `FARHEAP_TEST_SEED` the first one's seed:
/// `FARHEAP_NETWORK_SCHEDULES=10000 cargo test -p farheap-nbd --test schedules -- --nocapture` takes some minutes.
const SCHEDULES: u64 = 24;

/// Names of what happens to servers, by number.
const STRIKES: [&str; 13] = [
    "killed, and away",
    "all connections broken",
    "stopped",
    "slow at times",
    "refuses at times",
    "holds writes at times",
    "breaks the protocol at times",
    "carries out what it held",
    "is remembered",
    "cut off",
    "deaf on its connections",
    "answers in another order at times",
    "may begin anew",
];

/// A page as its user knows it: where it is, and a number that stands for its hash.
#[derive(Clone, Copy, Debug)]
struct Known {
    place: u64,
    number: u64,
}

struct World {
    dice: Dice,
    /// Servers that may be lost at a time; 0: there are copies.
    parity: usize,
    servers: Vec<TestServer>,
    client: Client,
    queue: NbdQueue,
    free: Vec<u64>,
    pages: HashMap<u64, Known>,
    numbers: u64,
    /// What a server held some time ago, and which may come back with that.
    old: Vec<Option<Vec<u8>>>,
    has_begun_anew: bool,
    /// Pages may be gone.
    may_lose: bool,
    retired: u64,
    start: Instant,
    history: Vec<Happened>,
}

/// What happened to a place, or to a server; printed when a page does not come back.
#[derive(Debug)]
struct Happened {
    after: Duration,
    place: Option<u64>,
    what: String,
}

fn content(number: u64) -> Vec<u8> {
    let mut dice = Dice(number);
    (0..PAGE / 8).flat_map(|_| dice.roll().to_ne_bytes()).collect()
}

impl World {
    fn new(seed: u64, parity: usize) -> World {
        let mut dice = Dice(seed);
        let least = if parity > 0 { parity + 2 } else { 1 };
        let count = least + dice.below(3) as usize;
        let start = |_| {
            let is_chunked = seed.is_multiple_of(2);
            TestServer::start_apart(Announced { size: SIZE, is_chunked, ..Announced::default() })
        };
        let servers: Vec<TestServer> = (0..count).map(start).collect();
        let addresses: Vec<_> = servers.iter().map(|server| server.address.clone()).collect();
        let patient = NbdTimes { connect: Duration::from_secs(20), ..TIMES };
        let client = match parity {
            0 => client(&addresses, patient),
            _ => striped(&addresses, parity, patient),
        };
        common::mark(&client);
        let queue = client.open_queue(8).expect("a queue");
        World {
            dice,
            parity,
            old: servers.iter().map(|_| None).collect(),
            servers,
            client,
            queue,
            free: (1..PLACES).map(|n| n * PAGE as u64).rev().collect(),
            pages: HashMap::new(),
            numbers: seed << 20,
            has_begun_anew: false,
            may_lose: false,
            retired: 0,
            start: Instant::now(),
            history: Vec::new(),
        }
    }

    fn note(&mut self, place: Option<u64>, what: String) {
        let is_repeated = |last: &Happened| last.place == place && last.what == what;
        if !self.history.last().is_some_and(is_repeated) {
            self.history.push(Happened { after: self.start.elapsed(), place, what });
        }
    }

    /// All that happened to a page's place and to the servers, and what they hold there.
    fn history_of(&self, known: Known) -> String {
        let is_told = |event: &&Happened| event.place.is_none_or(|place| place == known.place);
        let events = self.history.iter().filter(is_told);
        let mut text: String =
            events.map(|event| format!("{:>9.3?} {}\n", event.after, event.what)).collect();
        for (at, server) in self.servers.iter().enumerate() {
            text += &format!("server {at}: {:?}\n", self.client.stats()[at]);
            if self.parity > 0 {
                continue; // Nobody outside of the client knows where it is.
            }
            let memory = server.control.memory();
            let bytes = &memory[known.place as usize..][..PAGE];
            let number = (self.numbers >> 20 << 20..self.numbers).find(|n| bytes == content(*n));
            let held = match number {
                Some(number) => format!("number {number:#x}"),
                None if bytes.iter().all(|byte| *byte == 0) => "zeros".to_owned(),
                None => "other bytes".to_owned(),
            };
            text += &format!("server {at} holds {held} there\n");
        }
        text
    }

    /// Runs requests of one kind together; returns their ends by token.
    fn run(&mut self, is_read: bool, places: &[u64], pages: &mut [Page]) -> HashMap<u64, Ending> {
        for ((token, place), page) in (0..).zip(places).zip(pages) {
            push(&mut self.queue, token, is_read, *place, page);
        }
        let (start, mut ends) = (Instant::now(), HashMap::new());
        while ends.len() < places.len() {
            assert!(start.elapsed() < NEVER_LONGER, "{} of {places:?}", ends.len());
            let mut done = |end: NbdEnd| {
                assert!(ends.insert(end.token, end.ending).is_none(), "reported twice");
            };
            self.queue.wait(Duration::from_millis(20), &mut done).expect("a wait");
        }
        ends
    }

    fn write_some(&mut self) {
        let count = (1 + self.dice.below(8)).min(self.free.len() as u64);
        let mut of = Vec::new();
        for _ in 0..count {
            let page = self.dice.below(PAGES);
            if !of.contains(&page) {
                of.push(page);
            }
        }
        let first = self.numbers;
        self.numbers += of.len() as u64;
        let places: Vec<u64> = of.iter().map(|_| self.free.pop().expect("counted")).collect();
        let mut pages: Vec<Page> =
            (first..first + of.len() as u64).map(|number| Page(content(number))).collect();
        for (token, ending) in self.run(false, &places, &mut pages) {
            let (page, place) = (of[token as usize], places[token as usize]);
            self.note(
                Some(place),
                format!("page {page} is written, {:#x}: {ending:?}", first + token),
            );
            match ending {
                Ending::Done => {
                    let known = Known { place, number: first + token };
                    let old = self.pages.insert(page, known);
                    if let Some(old) = old.filter(|_| self.parity > 0 && self.dice.below(4) == 0) {
                        // Servers may refuse, and be lost meanwhile.
                        let _ = self.client.trim(old.place, PAGE as u64);
                    }
                    self.free.extend(old.map(|old| old.place));
                }
                Ending::Failed(_) => self.free.push(place),
                Ending::Late | Ending::Barred => self.retired += 1,
            }
        }
        // Places are used again in another order.
        if self.free.len() > 2 {
            let (at, last) =
                (self.dice.below(self.free.len() as u64) as usize, self.free.len() - 1);
            self.free.swap(at, last);
        }
    }

    /// Reads a page as often as the pager does; true if its bytes came.
    fn read(&mut self, known: Known, attempts: u32) -> bool {
        (0..attempts).any(|_| {
            let mut found = [Page(vec![0; PAGE])];
            let ends = self.run(true, &[known.place], &mut found);
            let is_right = found[0].0 == content(known.number);
            if ends[&0] != Ending::Done || !is_right {
                self.note(Some(known.place), format!("it is read, {is_right}: {:?}", ends[&0]));
            }
            // With parity the client itself knows what it wrote.
            let may_be_wrong = self.parity == 0 || ends[&0] != Ending::Done;
            assert!(is_right || may_be_wrong, "{known:?}:\n{}", self.history_of(known));
            ends[&0] == Ending::Done && is_right
        })
    }

    fn read_some(&mut self) {
        let page = self.dice.below(PAGES);
        if let Some(known) = self.pages.get(&page).copied() {
            self.read(known, 1);
        }
    }

    /// Something happens to a server.
    fn strike(&mut self) {
        let at = self.dice.below(self.servers.len() as u64) as usize;
        let rate = 4 + self.dice.below(12);
        let mut dice = Dice(self.dice.roll());
        let how = self.dice.below(STRIKES.len() as u64) as usize;
        self.note(None, format!("server {at}: {}", STRIKES[how]));
        let control = &self.servers[at].control;
        match how {
            0 => control.kill(true),
            1 => control.kill(false),
            2 => control.pause(true),
            3 => control.plan(move |_| {
                if dice.below(rate) == 0 { Plan::Slowly(dice.below(80)) } else { Plan::Answer }
            }),
            4 => control
                .plan(move |_| if dice.below(rate) == 0 { Plan::Refuse(5) } else { Plan::Answer }),
            5 => control.plan(move |asked| {
                let is_held = asked.command != READ && dice.below(rate) == 0;
                if is_held { Plan::Hold } else { Plan::Answer }
            }),
            6 => control.plan(move |_| {
                let how = [Plan::Hang, Plan::DoAndHang, Plan::WrongCookie, Plan::Garbage];
                if dice.below(rate) == 0 { how[dice.below(4) as usize] } else { Plan::Answer }
            }),
            7 => drop(control.carry_out_held()),
            8 => self.old[at] = Some(control.memory()),
            9 => self.servers[at].network.as_ref().expect("apart").cut(),
            10 => control.turn_deaf(),
            11 => control.plan(
                move |_| {
                    if dice.below(16) < rate { Plan::Later } else { Plan::Answer }
                },
            ),
            _ => self.begin_anew(at),
        }
    }

    /// A server loses what it had, or all since some time ago.
    fn begin_anew(&mut self, at: usize) {
        let stats = self.client.stats();
        let others_have_all = self.parity > 0
            || (0..self.servers.len())
                .any(|other| other != at && stats[other].lacking == 0 && stats[other].barred == 0);
        // Once in a schedule: nobody knows which pages a server lacks that has come back with old ones. Mostly where it
        // loses nothing.
        if self.has_begun_anew || !others_have_all && self.dice.below(4) > 0 {
            return;
        }
        (self.has_begun_anew, self.may_lose) = (true, !others_have_all);
        self.note(None, format!("server {at} has begun anew, {stats:?}"));
        let control = &self.servers[at].control;
        control.kill(true);
        control.forget_held();
        control.set_memory(self.old[at].take().unwrap_or_else(|| vec![0; SIZE as usize]));
        control.revive();
    }

    fn heal(&mut self) {
        self.note(None, "all is well again".to_owned());
        for server in &self.servers {
            server.network.as_ref().expect("apart").repair(self.dice.below(2) == 0);
            server.control.carry_out_held();
            server.control.behave();
            server.control.pause(false);
            server.control.revive();
        }
    }
}

fn schedule(seed: u64, parity: usize) -> (u64, u64) {
    let mut world = World::new(seed, parity);
    for _ in 0..STEPS {
        match world.dice.below(12) {
            0 => world.strike(),
            1 => world.heal(),
            2..7 => world.write_some(),
            _ => world.read_some(),
        }
    }
    world.heal();
    let mut known: Vec<_> = world.pages.iter().map(|(page, known)| (*page, *known)).collect();
    known.sort_unstable_by_key(|(page, _)| *page);
    let mut lost = 0;
    for (page, known) in known {
        let start = Instant::now();
        // As long as reads fail they are repeated until a deadline; other bytes are taken for lost after some.
        while !world.read(known, 4) {
            if world.may_lose {
                lost += 1;
                break;
            }
            let waited = start.elapsed();
            assert!(
                waited < NEVER_LONGER,
                "seed {seed}: page {page}, {known:?} does not come back:\n{}",
                world.history_of(known)
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    (lost, world.retired)
}

fn run_schedules(parity: impl Fn(u64) -> usize) -> (u64, u64) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let clock = now.expect("the clock is past 1970").as_nanos() as u64 >> 10;
    let count = number("FARHEAP_NETWORK_SCHEDULES");
    let (seeds, count) = match number("FARHEAP_TEST_SEED") {
        Some(seed) => (seed, count.unwrap_or(1)),
        None => (clock % 1_000_000_007, count.unwrap_or(SCHEDULES)),
    };
    let (mut lost, mut retired) = (0, 0);
    for seed in seeds..seeds + count {
        println!("schedules: FARHEAP_TEST_SEED={seed}, parity {}", parity(seed));
        let (lost_now, retired_now) = schedule(seed, parity(seed));
        (lost, retired) = (lost + lost_now, retired + retired_now);
    }
    println!("{count} schedules: {lost} pages seen to be lost, {retired} places given up");
    (lost, retired)
}

#[test]
fn every_page_comes_back_or_is_seen_to_be_lost() {
    run_schedules(|_| 0);
}

#[test]
fn every_page_with_parity_comes_back_and_no_place_is_given_up() {
    assert_eq!(run_schedules(|seed| 1 + seed as usize % 2), (0, 0));
}
