//! A table on a server, as the client has it: whose it is, and what a flush and a read know.

#[path = "common/certificates.rs"]
mod certificates;
mod common;
#[path = "table/copies.rs"]
mod copies;

use certificates::{Activated, Authority, nbdkit_tls};
use common::{Announced, Dice, PATIENCE, Page, Plan, READ, TRIM, TestServer, WRITE, push, run};
use farheap_nbd::{Client, Ending, MARK_LEN, NetworkError, ServerList};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const START: u64 = 1 << 20;
const PAGES: std::ops::Range<u64> = START..8 << 20;
/// Connections are given up after a sixth of it.
const DEADLINE: Duration = Duration::from_secs(18);
/// Where nothing is to fall silent: a minute to shake hands, on a machine that is busy.
const LONG_DEADLINE: Duration = Duration::from_secs(360);

fn server() -> TestServer {
    TestServer::start(Announced::default())
}

fn client_of(server: &TestServer) -> Client {
    let list: ServerList = server.address.to_string().parse().expect("an address");
    tended(Client::of_table(&list, DEADLINE).expect("a table's server"))
}

fn tended(client: Client) -> Client {
    for at in 0..client.tenders() {
        let tender = client.tender(at, Box::new(|text| println!("{text}")));
        std::thread::spawn(move || tender.run());
    }
    client
}

/// Opens the table there, or makes one.
fn open(server: &TestServer, run: u64) -> Result<Client, NetworkError> {
    let client = client_of(server);
    let pages = client.find_table()?.unwrap_or(PAGES);
    assert_eq!(pages, PAGES);
    client.take_table(pages, Some(run))?;
    Ok(client)
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn write(client: &Client, place: u64, byte: u8) -> Ending {
    let mut queue = client.open_queue(4).expect("a queue");
    run(&mut queue, false, START + place * PAGE as u64, &mut Page::of(byte, PAGE))
}

fn read(client: &Client, place: u64) -> (Ending, u8) {
    let mut queue = client.open_queue(4).expect("a queue");
    let mut page = Page::of(0xff, PAGE);
    let ending = run(&mut queue, true, START + place * PAGE as u64, &mut page);
    (ending, page.0[0])
}

#[test]
fn of_those_who_open_a_table_at_the_same_time_one_has_it_at_most() {
    for round in 0..6 {
        let server = server();
        if round % 2 == 1 {
            drop(open(&server, 99).expect("a table, closed again"));
        }
        let start = Barrier::new(3);
        let opened: Vec<_> = std::thread::scope(|scope| {
            let openers = (1..=3).map(|run| {
                let (server, start) = (&server, &start);
                scope.spawn(move || {
                    start.wait();
                    open(server, run)
                })
            });
            let openers: Vec<_> = openers.collect();
            openers.into_iter().map(|opener| opener.join().expect("an opener")).collect()
        });
        let owners: Vec<_> = opened.iter().flatten().collect();
        assert!(owners.len() <= 1, "round {round}: {} owners", owners.len());
        for owner in owners {
            assert_eq!(write(owner, 3, 1), Ending::Done, "round {round}");
            assert_eq!(owner.flush(), Ok(()), "round {round}");
        }
        for error in opened.iter().filter_map(|opened| opened.as_ref().err()) {
            let text = error.to_string();
            assert!(text.contains("another process"), "round {round}: {text}");
        }
    }
}

#[test]
fn an_owner_that_cannot_look_at_its_mark_does_not_write() {
    let server = server();
    let client = open(&server, 7).expect("a table");
    let mut queue = client.open_queue(4).expect("a queue");
    let mut write_to = |place: u64, byte| {
        let offset = START + place * PAGE as u64;
        run(&mut queue, false, offset, &mut Page::of(byte, PAGE))
    };
    assert_eq!(write_to(0, 1), Ending::Done);
    server.control.plan(|asked| {
        let is_look = asked.command == READ && asked.offset == 0;
        if is_look { Plan::Refuse(5) } else { Plan::Answer }
    });
    let start = Instant::now();
    // A place and what it holds.
    let (mut place, mut byte) = (0, 1_u8);
    let end = loop {
        assert!(start.elapsed() < PATIENCE, "it writes on");
        match write_to(place, byte.wrapping_add(1)) {
            Ending::Done => byte = byte.wrapping_add(1),
            // The server's thread did not run for long. What the place holds nobody knows; the next one holds zeros.
            Ending::Late | Ending::Barred => (place, byte) = (place + 1, 0),
            end => break end,
        }
    };
    assert_eq!(end, Ending::Failed(libc::ENOTCONN));
    let offset = START as usize + place as usize * PAGE;
    assert_eq!(server.control.memory()[offset], byte, "what was not written");
    server.control.behave();
    until("it writes again", || {
        let end = write_to(place, 99);
        place += u64::from(matches!(end, Ending::Late | Ending::Barred));
        end == Ending::Done
    });
}

#[test]
fn an_owner_writes_nothing_over_what_another_one_has_written() {
    let server = server();
    let client = open(&server, 7).expect("a table");
    assert_eq!(write(&client, 0, 1), Ending::Done);
    let mut memory = server.control.memory();
    memory[..20].copy_from_slice(b"another one's export");
    server.control.set_memory(memory);
    until("it sees that", || client.flush() == Err(libc::EBUSY));
    until("it gives up", || client.stats()[0].state == farheap_nbd::ServerState::Taken);
    let before = server.control.memory();
    drop(client);
    assert!(server.control.memory() == before, "nothing was written, nor was a mark");
}

#[test]
fn a_flush_relies_on_no_connection_of_which_it_did_not_look_at_all() {
    let server = server();
    let client = open(&server, 7).expect("a table");
    assert_eq!(write(&client, 0, 1), Ending::Done);
    assert_eq!(client.flush(), Ok(()));
    let before = server.control.memory();
    assert_eq!(write(&client, 0, 2), Ending::Done);
    server.control.kill(true);
    server.control.set_memory(before);
    let is_refusing = Arc::new(AtomicBool::new(true));
    let of_server = Arc::clone(&is_refusing);
    server.control.plan(move |asked| {
        let is_page = asked.command == READ && asked.offset >= START;
        if is_page && of_server.load(Ordering::SeqCst) { Plan::Refuse(5) } else { Plan::Answer }
    });
    server.control.revive();
    for _ in 0..2 {
        assert_eq!(client.flush(), Err(libc::ENOTCONN), "the block cannot be looked at");
    }
    is_refusing.store(false, Ordering::SeqCst);
    for _ in 0..2 {
        until("the server has lost it", || client.flush() == Err(libc::ESTALE));
    }
}

#[test]
fn a_flush_that_breaks_off_is_the_last_one() {
    let server = server();
    let client = open(&server, 7).expect("a table");
    assert_eq!(write(&client, 0, 1), Ending::Done);
    server.control.plan(|asked| if asked.command == 3 { Plan::Hang } else { Plan::Answer });
    assert_eq!(client.flush(), Err(libc::EIO));
    server.control.behave();
    assert_eq!(client.flush(), Err(libc::EIO), "what became of it nobody knows");
}

#[test]
fn a_block_that_changed_at_the_server_is_an_error_and_an_unknown_one_is_read() {
    let server = server();
    let mut memory = vec![0; 16 << 20];
    memory[START as usize..][..PAGE].fill(5);
    server.control.set_memory(memory);
    let client = open(&server, 7).expect("a table");
    assert_eq!(read(&client, 0), (Ending::Done, 5));
    assert_eq!(write(&client, 1, 6), Ending::Done);
    assert_eq!(read(&client, 1), (Ending::Done, 6));
    let mut memory = server.control.memory();
    memory[START as usize..][..2 * PAGE].fill(8);
    server.control.set_memory(memory);
    for place in 0..2 {
        assert_eq!(read(&client, place).0, Ending::Failed(libc::EBADMSG), "place {place}");
        let mut page = Page::of(0, PAGE);
        let offset = START + place * PAGE as u64;
        assert_eq!(common::read_now(&client, offset, &mut page), Err(libc::EBADMSG));
    }
    assert_eq!(write(&client, 0, 9), Ending::Done, "written anew");
    assert_eq!(read(&client, 0), (Ending::Done, 9));
}

#[test]
fn a_table_with_a_place_that_a_write_may_reach_late_is_not_closed() {
    let server = server();
    let client = open(&server, 7).expect("a table");
    server.control.plan(|asked| {
        let is_page = asked.command == WRITE && asked.offset >= START;
        if is_page { Plan::Hold } else { Plan::Answer }
    });
    assert_eq!(write(&client, 4, 1), Ending::Late);
    server.control.behave();
    assert_eq!(write(&client, 4, 2), Ending::Barred, "it is not written again");
    assert_eq!(write(&client, 5, 2), Ending::Done, "others are");
    assert_eq!(client.flush(), Ok(()), "of what was written");
    drop(client);
    let mark = server.control.memory()[..MARK_LEN].to_vec();
    assert!(String::from_utf8_lossy(&mark).contains(" open by run 7 "));
    let start = Instant::now();
    let client = open(&server, 8).expect("its owner is dead");
    assert!(start.elapsed() >= Duration::from_secs(10), "it was waited for");
    drop(client);
    let mark = server.control.memory()[..MARK_LEN].to_vec();
    assert!(String::from_utf8_lossy(&mark).contains(" closed by run 8 "));
}

#[test]
fn a_read_whose_connection_breaks_is_sent_again() {
    let server = server();
    let client = open(&server, 7).expect("a table");
    assert_eq!(write(&client, 0, 3), Ending::Done);
    let reads = AtomicU64::new(0);
    server.control.plan(move |asked| {
        let is_page = asked.command == READ && asked.offset >= START;
        let is_second = is_page && reads.fetch_add(1, Ordering::SeqCst).is_multiple_of(2);
        if is_second { Plan::Hang } else { Plan::Answer }
    });
    for _ in 0..4 {
        assert_eq!(read(&client, 0), (Ending::Done, 3));
        let mut page = Page::of(0, PAGE);
        assert_eq!(common::read_now(&client, START, &mut page), Ok(()));
    }
}

#[test]
fn a_read_whose_connection_falls_silent_is_sent_again() {
    let server = server();
    let client = open(&server, 7).expect("a table");
    assert_eq!(write(&client, 0, 3), Ending::Done);
    let silent_once = || {
        let has_been = AtomicBool::new(false);
        server.control.plan(move |asked| {
            let is_page = asked.command == READ && asked.offset >= START;
            let is_first = is_page && !has_been.swap(true, Ordering::SeqCst);
            if is_first { Plan::Await } else { Plan::Answer }
        });
    };
    // Again where this process was stopped for longer than a read is repeated; one that is not repeated always fails.
    until("the queue sends it again", || {
        silent_once();
        let read = |mut queue| run(&mut queue, true, START, &mut Page::of(0, PAGE));
        client.open_queue(4).map(read).is_ok_and(|end| end == Ending::Done)
    });
    until("so does a read at once", || {
        silent_once();
        common::read_now(&client, START, &mut Page::of(0, PAGE)).is_ok()
    });
    server.control.let_go();
}

/// Closes a table whose owner could not look at its mark until its lease ended; returns whether it is marked as closed.
fn is_closed_after_its_lease() -> bool {
    let server = server();
    let client = open(&server, 7).expect("a table");
    let mut queue = client.open_queue(4).expect("a queue");
    server.control.plan(|asked| {
        let is_look = asked.command == READ && asked.offset == 0;
        if is_look { Plan::Refuse(5) } else { Plan::Answer }
    });
    let mut write = || run(&mut queue, false, START, &mut Page::of(3, PAGE));
    let start = Instant::now();
    let is_last = |end: &Ending| *end != Ending::Done || start.elapsed() > PATIENCE;
    let end = (0..).map(|_| write()).find(is_last);
    drop(queue);
    server.control.plan(|asked| match asked.command {
        WRITE if asked.offset == MARK_LEN as u64 => Plan::Refuse(5), // No beat, and no lease.
        _ => Plan::Answer,
    });
    drop(client);
    let mark = server.control.memory()[..MARK_LEN].to_vec();
    end == Some(Ending::Failed(libc::ENOTCONN))
        && String::from_utf8_lossy(&mark).contains(" closed by run 7 ")
}

#[test]
fn an_owner_that_could_not_look_for_long_looks_when_it_closes() {
    // Again where this process was stopped, so that a write may come late; one that does not look never closes it.
    until("it is closed", is_closed_after_its_lease);
}

#[test]
fn who_has_only_looked_at_a_table_of_a_dead_owner_does_not_close_it() {
    let server = server();
    let client = open(&server, 7).expect("a table");
    let while_open = server.control.memory();
    drop(client);
    server.control.set_memory(while_open);
    let looker = client_of(&server);
    assert_eq!(looker.find_table().expect("its owner is dead"), Some(PAGES));
    drop(looker);
    let mark = server.control.memory()[..MARK_LEN].to_vec();
    assert!(String::from_utf8_lossy(&mark).contains(" open by run 7 "));
}

#[test]
fn a_table_on_qemu_is_opened_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let disk = dir.path().join("disk");
    std::fs::File::create(&disk).and_then(|file| file.set_len(16 << 20)).expect("a file");
    let mut server = Activated::new();
    let disk = disk.display().to_string();
    let arguments = ["--shared=0", "--persistent", "--format=raw", &disk];
    let Some(()) = server.start("qemu-nbd", &arguments) else { return };
    assert_is_opened_again(&server.plain_address().to_string().parse().expect("an address"));
}

#[test]
fn a_table_by_tls_is_opened_again() {
    let authority = Authority::new();
    let certificates = authority.make("localhost", &["127.0.0.1"], false);
    let Some(server) = nbdkit_tls(&certificates, &["--tls-verify-peer"]) else { return };
    assert_is_opened_again(&server.address(&certificates).to_string().parse().expect("an address"));
}

fn assert_is_opened_again(list: &ServerList) {
    for add in 0..2 {
        let client = tended(Client::of_table(list, LONG_DEADLINE).expect("a table's server"));
        let pages = client.find_table().expect("nobody has it open");
        assert_eq!(pages.is_some(), add > 0);
        client.take_table(PAGES, Some(7 + add)).expect("taken");
        if add > 0 {
            assert_eq!(read(&client, 0), (Ending::Done, 1));
        }
        assert_eq!(write(&client, 0, 1), Ending::Done);
        assert_eq!(client.flush(), Ok(()));
    }
}

/// A server whose power may fail: then it has what was there at its last flush.
struct Volatile {
    server: TestServer,
    durable: Arc<Mutex<Vec<u8>>>,
}

impl Volatile {
    fn start() -> Volatile {
        let size = START + (BLOCKS + 1) * PAGE as u64;
        let server = TestServer::start(Announced { size, ..Announced::default() });
        Volatile { server, durable: Arc::default() }
    }

    /// Answers, but for 2/`odds` of the writes of blocks: the connection ends, with what was written or without it.
    fn behave(&self, seed: u64, odds: u64) {
        let (control, durable) = (Arc::clone(&self.server.control), Arc::clone(&self.durable));
        let mut dice = Dice(seed);
        self.server.control.plan(move |asked| {
            if asked.command == 3 {
                // Before the answer: all that was answered so far is there.
                *durable.lock().expect("unpoisoned") = control.memory();
            }
            let is_page = asked.command == WRITE && asked.offset >= START;
            match dice.below(odds) {
                0 if is_page => Plan::Hang,
                1 if is_page => Plan::DoAndHang,
                _ => Plan::Answer,
            }
        });
    }

    fn fail(&self) {
        self.server.control.kill(true);
        self.server.control.set_memory(self.durable.lock().expect("unpoisoned").clone());
        self.server.control.revive();
    }
}

/// The printed seed of a run.
fn seed() -> u64 {
    let seed = std::env::var("FARHEAP_TEST_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.expect("the clock is past 1970").as_nanos() as u64
    });
    println!("FARHEAP_TEST_SEED={seed}");
    seed
}

const BLOCKS: u64 = 16;
const ROUNDS: u64 = 6;

/// What a block may be: what was written last, or since then in vain.
#[derive(Clone, Default)]
struct Allowed(Vec<u8>);

#[test]
fn what_a_flush_has_promised_outlives_the_servers_power_and_nothing_stale_is_read() {
    let mut dice = Dice(seed());
    let (mut flushes, mut losses, mut stale) = (0, 0, 0);
    for round in 0..ROUNDS {
        let volatile = Volatile::start();
        volatile.behave(dice.roll(), 60);
        let list: ServerList = volatile.server.address.to_string().parse().expect("an address");
        let client = tended(Client::of_table(&list, DEADLINE).expect("a table's server"));
        client.find_table().expect("nobody has it open");
        client.take_table(START..START + BLOCKS * PAGE as u64, Some(7)).expect("taken");
        assert_eq!(client.flush(), Ok(()), "round {round}");
        let mut blocks = vec![Allowed(vec![0]); BLOCKS as usize];
        let mut queue = client.open_queue(4).expect("a queue");
        for step in 0..60 {
            let (at, byte) = (dice.below(BLOCKS), dice.roll() as u8);
            let (allowed, offset) = (&mut blocks[at as usize].0, START + at * PAGE as u64);
            match dice.below(12) {
                0 => {
                    let flushed = client.flush();
                    flushes += u32::from(flushed.is_ok());
                    losses += u32::from(flushed == Err(libc::ESTALE));
                    let durable = volatile.durable.lock().expect("unpoisoned");
                    let is_there = |(at, block): (usize, &Allowed)| {
                        block.0.contains(&durable[START as usize + at * PAGE])
                    };
                    let is_all = blocks.iter().enumerate().all(is_there);
                    assert!(is_all || flushed.is_err(), "round {round}, step {step}: {flushed:?}");
                }
                1 if step % 3 == 0 => volatile.fail(),
                2 if step % 3 == 0 => volatile.server.control.kill(false),
                1..=7 => match run(&mut queue, false, offset, &mut Page::of(byte, PAGE)) {
                    Ending::Done => *allowed = vec![byte],
                    Ending::Failed(_) | Ending::Late | Ending::Barred => allowed.push(byte),
                },
                _ => {
                    let mut page = Page::of(!byte, PAGE);
                    let end = run(&mut queue, true, offset, &mut page);
                    stale += u32::from(end == Ending::Failed(libc::EBADMSG));
                    let is_right = allowed.contains(&page.0[0]);
                    assert!(end != Ending::Done || is_right, "round {round}, step {step}");
                }
            }
        }
    }
    println!("{flushes} flushes, {losses} that found something lost, {stale} stale blocks");
    assert!(flushes > 0 && losses + stale > 0, "it tests nothing");
}

#[test]
fn an_answer_of_a_server_that_has_restarted_since_does_not_count() {
    let server = server();
    let client = open(&server, 7).expect("a table");
    assert_eq!(client.flush(), Ok(()));
    let before = server.control.memory();
    let mut queue = client.open_queue(4).expect("a queue");
    let mut pages = [Page::of(1, PAGE), Page::of(2, PAGE)];
    for (token, page) in (0..).zip(&mut pages) {
        push(&mut queue, token, false, START + token * PAGE as u64, page);
    }
    queue.submit();
    // The first one's answer is on its way then: a connection's requests are served in their order.
    let second = START as usize + PAGE;
    until("the server has done both", || server.control.memory()[second] == 2);
    server.control.kill(true);
    server.control.set_memory(before);
    server.control.revive();
    until("it serves again", || client.flush() == Ok(()));
    let mut ends = Vec::new();
    while ends.len() < 2 {
        queue.wait(Duration::from_millis(20), &mut |end| ends.push(end)).expect("a wait");
    }
    let flushed = client.flush();
    for end in ends.iter().filter(|end| end.ending == Ending::Done) {
        let is_there = server.control.memory()[end.offset as usize] == 1 + end.token as u8;
        assert!(is_there || flushed.is_err(), "{end:?} was promised: {flushed:?}");
    }
}

#[test]
fn what_an_owner_has_read_is_durable_by_its_flush() {
    let server = server();
    let durable = Arc::new(Mutex::new(server.control.memory()));
    let (control, of_server) = (Arc::clone(&server.control), Arc::clone(&durable));
    server.control.plan(move |asked| {
        if asked.command == 3 {
            *of_server.lock().expect("unpoisoned") = control.memory();
        }
        Plan::Answer
    });
    let first = open(&server, 7).expect("a table");
    assert_eq!(write(&first, 0, 5), Ending::Done);
    assert_eq!(first.flush(), Ok(()));
    assert_eq!(write(&first, 0, 6), Ending::Done, "not flushed");
    drop(first);
    let second = open(&server, 8).expect("closed");
    assert_eq!(read(&second, 0), (Ending::Done, 6));
    // The server had written the mark to its disk.
    let head = 2 * MARK_LEN;
    let mark_and_beat = server.control.memory()[..head].to_vec();
    server.control.kill(true);
    let pages = durable.lock().expect("unpoisoned")[head..].to_vec();
    server.control.set_memory([mark_and_beat, pages].concat());
    server.control.revive();
    let mut flushed = Err(libc::ENOTCONN);
    until("it serves again", || {
        flushed = second.flush();
        flushed != Err(libc::ENOTCONN)
    });
    let byte = server.control.memory()[START as usize];
    assert!(flushed.is_err() || byte == 6, "{byte} is durable, and 6 was read");
}

#[test]
fn the_last_beat_of_a_dead_owner_that_comes_late_is_no_sign_of_life() {
    let server = server();
    let owner = open(&server, 7).expect("a table");
    let is_held = Arc::new(AtomicBool::new(false));
    let of_server = Arc::clone(&is_held);
    server.control.plan(move |asked| {
        let is_beat = asked.command == WRITE && asked.offset == MARK_LEN as u64;
        if is_beat && !of_server.swap(true, Ordering::SeqCst) { Plan::Hold } else { Plan::Answer }
    });
    until("a beat is held", || is_held.load(Ordering::SeqCst));
    // Its process ends, as far as the server can tell.
    let open_by_owner = server.control.memory()[..2 * MARK_LEN].to_vec();
    drop(owner);
    let mut memory = server.control.memory();
    memory[..2 * MARK_LEN].copy_from_slice(&open_by_owner);
    server.control.set_memory(memory);
    let looks = Arc::new(AtomicU64::new(0));
    let of_server = Arc::clone(&looks);
    server.control.plan(move |asked| {
        let is_look = asked.command == READ && asked.offset == 0;
        of_server.fetch_add(u64::from(is_look), Ordering::SeqCst);
        Plan::Answer
    });
    let opened = std::thread::scope(|scope| {
        let opener = scope.spawn(|| open(&server, 8));
        until("it has looked", || looks.load(Ordering::SeqCst) > 2);
        assert_eq!(server.control.carry_out_held(), 1);
        opener.join().expect("an opener")
    });
    assert!(opened.is_ok(), "{}", opened.err().map_or(String::new(), |error| error.to_string()));
}

#[test]
fn a_long_trim_ends_with_the_lease() {
    const PIECES: u64 = 9;
    let server = TestServer::start(Announced { size: 64 << 20, ..Announced::default() });
    let client = client_of(&server);
    assert_eq!(client.find_table().expect("no table"), None);
    client.take_table(START..48 << 20, Some(7)).expect("taken");
    let trims = Arc::new(AtomicU64::new(0));
    let of_server = Arc::clone(&trims);
    server.control.plan(move |asked| {
        of_server.fetch_add(u64::from(asked.command == TRIM), Ordering::SeqCst);
        Plan::Answer
    });
    until("there is a connection for it", || {
        client.trim(START, PAGE as u64) == Ok(()) && trims.load(Ordering::SeqCst) > 0
    });
    trims.store(0, Ordering::SeqCst);
    let of_server = Arc::clone(&trims);
    server.control.plan(move |asked| match asked.command {
        TRIM => {
            of_server.fetch_add(1, Ordering::SeqCst);
            Plan::Slowly(1500) // All of them take longer than a lease.
        }
        READ => Plan::Refuse(5),
        _ => Plan::Answer,
    });
    assert_eq!(client.trim(START, PIECES * (4 << 20)), Err(libc::ENOTCONN));
    assert!(trims.load(Ordering::SeqCst) < PIECES, "another may have the table by then");
}

#[test]
fn a_trim_that_has_waited_for_a_connection_is_not_sent_after_the_lease() {
    let server = server();
    let list: ServerList = server.address.to_string().parse().expect("an address");
    // Connections are given up after a sixth of it: later than the lease ends.
    let client = tended(Client::of_table(&list, DEADLINE * 10).expect("a table's server"));
    assert_eq!(client.find_table().expect("no table"), None);
    client.take_table(PAGES, Some(7)).expect("taken");
    let [reads, trims] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
    let of_server = Arc::clone(&reads);
    server.control.plan(move |asked| {
        let is_page = asked.command == READ && asked.offset >= START;
        of_server.fetch_add(u64::from(is_page), Ordering::SeqCst);
        if is_page { Plan::Await } else { Plan::Answer }
    });
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| common::read_now(&client, START, &mut Page::of(0, PAGE)));
        }
        until("all connections are in use", || reads.load(Ordering::SeqCst) == 4);
        let of_server = Arc::clone(&trims);
        server.control.plan(move |asked| {
            of_server.fetch_add(u64::from(asked.command == TRIM), Ordering::SeqCst);
            if asked.command == READ { Plan::Refuse(5) } else { Plan::Answer }
        });
        let trim = scope.spawn(|| client.trim(START, PAGE as u64));
        // A lease ends by the clock.
        std::thread::sleep(Duration::from_secs(6));
        server.control.let_go();
        assert_eq!(trim.join().expect("a trim"), Err(libc::ENOTCONN));
    });
    assert_eq!(trims.load(Ordering::SeqCst), 0, "another may have the table by then");
}
