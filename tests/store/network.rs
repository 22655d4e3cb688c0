//! Stores on servers: what is accepted, and that a region's pages come back whatever the servers do.

#![expect(unsafe_code, reason = "writes to mapped ranges of regions")]

use super::*;
use crate::common::{consumer, eventually, region};
use crate::servers::{Announced, Plan, TestServer, WRITE, nbdkit};
use farheap::Stats;
use farheap::config::Builder;
use farheap::manager::MemoryManager;
use farheap::region::{Region, RegionConfig};
use farheap::store::{ServerState, ServerStats};
use std::sync::atomic::{AtomicU64, Ordering};

const SIZE: u64 = 64 << 20;

fn server() -> TestServer {
    TestServer::start(Announced { size: SIZE, ..Announced::default() })
}

fn open(device: &str, more: &str) -> farheap::Result<Arc<dyn Store>> {
    Builder::default().parse(&format!("device:\"{device}\"{more}"))?.open_store()
}

fn plain(servers: &[TestServer]) -> String {
    let addresses: Vec<String> = servers.iter().map(|server| server.address.to_string()).collect();
    format!("{}?encrypt=off", addresses.join(","))
}

#[test]
fn an_export_is_a_store_that_leaves_its_ends_alone_and_is_free_again_afterwards() {
    let server = server();
    let device = plain(std::slice::from_ref(&server));
    for _ in 0..2 {
        let store = open(&device, "").expect("zeros, and then pages of an earlier run");
        assert_eq!(store.capacity(), ByteCount(SIZE - (2 << 20)));
        let mut queue = store.open_queue(8).expect("queue");
        let (mut written, mut read) = (pages(48, 1), pages(48, 2));
        run(&mut *queue, Op::Write, 0, &whole(&mut written)).expect("write");
        run(&mut *queue, Op::Read, 0, &scattered(&mut read)).expect("read");
        assert!(read.iter().rev().eq(&written), "{}", store.describe());
        drop(queue);
        let memory = server.control.memory();
        assert!(memory[PAGE..1 << 20].iter().all(|byte| *byte == 0), "the first MiB");
        assert!(
            memory[1 << 20..][..48 * PAGE]
                == written.iter().flat_map(|page| page.0).collect::<Vec<_>>()
        );
    }
}

#[test]
fn an_export_that_holds_data_is_refused_unless_it_may_be_overwritten() {
    let server = server();
    let mut memory = vec![0; SIZE as usize];
    memory[1080] = 7;
    server.control.set_memory(memory);
    let device = plain(std::slice::from_ref(&server));
    let error = open(&device, "").expect_err("data").to_string();
    assert!(error.contains("holds data at byte 1080") && error.contains("overwrite:on"), "{error}");
    open(&device, ",overwrite:on").expect("it may be lost");
    assert_eq!(server.control.memory()[1080], 0);
}

#[test]
fn what_follows_an_address_is_no_part_of_it() {
    let address = "nbds://127.0.0.1:1/x?tls-certificates=/nonexistent";
    for device in [address, &format!("{address}&encrypt=off")] {
        let error = open(device, "").expect_err("nobody listens").to_string();
        assert!(error.contains(&format!("{address}: cannot be used")), "{error}");
    }
}

#[test]
fn pages_are_encrypted_on_their_way_unless_told_otherwise() {
    let server = server();
    for device in [server.address.to_string(), plain(std::slice::from_ref(&server))] {
        let store = open(&device, "").expect("a store");
        let mut queue = store.open_queue(1).expect("queue");
        run(&mut *queue, Op::Write, 0, &whole(&mut [Page([0x5a; PAGE])])).expect("write");
        let is_plain = server.control.memory()[1 << 20..][..PAGE].iter().all(|byte| *byte == 0x5a);
        assert_eq!(is_plain, device.ends_with("encrypt=off"), "{}", store.describe());
        assert!(store.server(0).expect("a server").writes > 0 && store.server(1).is_none());
    }
}

/// A region whose pages have to leave, three times as many as fit.
fn crowded(store: Arc<dyn Store>) -> Option<(Region, *mut u64, usize)> {
    const LEN: ByteCount = ByteCount::mib(24);
    let config = RegionConfig::new().limit(ByteCount::mib(8)).deadline(Duration::from_secs(30));
    let region = region(config, store)?;
    let ptr = region.map(LEN).expect("mapped").cast::<u8>().as_ptr().cast();
    Some((region, ptr, LEN.get() as usize / 8))
}

/// Writes all of it and reads it again, with numbers of this round.
fn exercise(ptr: *mut u64, count: usize, round: u64) {
    let number = |at: usize| (at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ round;
    for at in 0..count {
        // SAFETY: within the region's mapping, which this thread alone uses.
        unsafe { ptr.wrapping_add(at).write(number(at)) };
    }
    for at in 0..count {
        // SAFETY: as above.
        let found = unsafe { ptr.wrapping_add(at).read() };
        assert_eq!(found, number(at), "round {round}, number {at}");
    }
}

fn shown(stats: &Stats) -> String {
    format!("{} written, {} errors of writes", stats.bytes_written, stats.write_errors)
}

#[test]
fn a_late_write_changes_no_page() {
    let server = server();
    let store = open(&plain(std::slice::from_ref(&server)), ",deadline:6s").expect("a store");
    let Some((region, ptr, count)) = crowded(store) else { return };
    let writes = AtomicU64::new(0);
    exercise(ptr, count, 0);
    // Now and then a connection hangs with writes in it, which the server carries out when the places would long be
    // others' again.
    server.control.plan(move |asked| {
        let is_held = asked.command == WRITE && writes.fetch_add(1, Ordering::Relaxed) % 40 == 39;
        if is_held { Plan::Hold } else { Plan::Answer }
    });
    exercise(ptr, count, 1);
    // One that is not answered is given up, also while others are.
    let until = Instant::now() + common::PATIENCE;
    while region.stats().write_errors == 0 {
        assert!(Instant::now() < until, "{}", shown(&region.stats()));
        std::thread::sleep(Duration::from_millis(10));
    }
    server.control.behave();
    exercise(ptr, count, 2);
    assert!(server.control.carry_out_held() > 0, "{}", shown(&region.stats()));
    for round in 3..5 {
        exercise(ptr, count, round);
        server.control.carry_out_held();
    }
    // Places that are given up cost one failure each, not one whenever their turn comes.
    let stats = region.stats();
    assert!((1..200).contains(&stats.write_errors), "{}", shown(&stats));
}

#[test]
fn pages_outlive_one_of_two_servers_at_a_time() {
    let servers = [server(), server()];
    let store = open(&plain(&servers), ",deadline:6s").expect("a store");
    let Some((region, ptr, count)) = crowded(store) else { return };
    let of_server = |at: usize| region.servers().nth(at).expect("there are two");
    for round in 0..4 {
        let [killed, other] = [round as usize % 2, 1 - round as usize % 2];
        // Until the other one has all that it lacks it does not suffice. Places are barred where a connection broke: once
        // all pages were written without that, they are elsewhere.
        let has_all = || {
            let before = of_server(other);
            exercise(ptr, count, round);
            let ServerStats { state, lacking, barred, .. } = of_server(other);
            state == ServerState::Up && lacking <= barred && barred == before.barred
        };
        assert!(eventually(has_all), "{:?}", region.servers().collect::<Vec<_>>());
        let control = &servers[killed].control;
        control.kill(true);
        exercise(ptr, count, round + 10);
        control.revive();
    }
    let has_all = || (0..2).all(|at| of_server(at).lacking <= of_server(at).barred);
    assert!(eventually(has_all), "{:?}", region.servers().collect::<Vec<_>>());
    assert!(region.stats().poisoned == 0);
    let counts: Vec<_> = region.servers().collect();
    assert_eq!(counts.len(), 2);
    let has_come_back = |server: &ServerStats| server.copied > 0 && server.connections > 0;
    assert!(counts.iter().all(has_come_back), "{counts:?}");
}

#[test]
fn pages_with_parity_outlive_each_server() {
    let servers = [server(), server(), server()];
    let device = format!("{}&parity=1", plain(&servers));
    let store = open(&device, ",deadline:6s").expect("a store");
    // Of 64 MiB each two parts of three are pages, and an eighth stays free.
    assert!(store.capacity() > ByteCount::mib(96), "{}", store.describe());
    let Some((region, ptr, count)) = crowded(store) else { return };
    for (round, server) in (0..).zip(&servers) {
        exercise(ptr, count, round);
        server.control.kill(true);
        exercise(ptr, count, round + 10);
        server.control.revive();
    }
    assert!(region.stats().poisoned == 0);
    let counts: Vec<_> = region.servers().collect();
    assert!(counts.len() == 3 && counts.iter().all(|server| server.writes > 0), "{counts:?}");
    assert!(counts.iter().any(|server| server.rebuilt > 0), "{counts:?}");
    drop(region);
    let error = open(&format!("{}?parity=1", servers[0].address), "").expect_err("one").to_string();
    assert!(error.contains("1 servers are not 3 to 8"), "{error}");
}

#[test]
fn a_region_counts_the_queues_of_its_store() {
    let servers = [server(), server(), server()];
    let striped = open(&format!("{}&parity=1", plain(&servers)), "").expect("a store");
    let in_memory: Arc<dyn Store> = Arc::new(MemStore::new(ByteCount::mib(64)).expect("a store"));
    let queues = |store: &dyn Store| store.queue_bytes(256).get() + store.queue_bytes(32).get();
    let more = queues(&*striped) - queues(&*in_memory);
    assert!(more > 1 << 20, "{more} bytes");
    let used = [in_memory, striped].map(|store| {
        let manager = MemoryManager::start(ByteCount::mib(64)).expect("a manager");
        let config = RegionConfig::new().span(ByteCount::gib(1)).handlers(1);
        let region = Region::create_under(&manager, config, store).ok()?;
        let used = consumer(&manager, "far heap").expect("it has joined").used_bytes.get();
        drop(region);
        Some(used)
    });
    let [Some(in_memory), Some(striped)] = used else {
        return println!("skipped: userfaultfd is not permitted here");
    };
    assert_eq!(striped, in_memory + more);
}

#[test]
fn a_region_on_nbdkit_reads_what_it_wrote() {
    let dir = tempfile::tempdir().expect("a directory");
    let Some(server) = nbdkit(dir.path(), &[], &["memory", "64M"]) else { return };
    let store = open(&server.address.to_string(), "").expect("a store");
    let Some((region, ptr, count)) = crowded(store) else { return };
    exercise(ptr, count, 0);
    assert!(region.stats().write_errors == 0, "{}", shown(&region.stats()));
}
