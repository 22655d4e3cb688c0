//! Tables on servers: what outlives processes, servers and connections, and what is refused or told.
//!
//! Guards: G5, G7.

use crate::common::child::{Victim, case};
use crate::common::eventually;
use crate::servers::{Announced, Plan, READ, TestServer, WRITE, nbdkit};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::{ByteCount, Error, PageId};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const CAPACITY: ByteCount = ByteCount::mib(8);
const PAGES: u64 = 600;
const FLUSH: u16 = 3;

fn manager() -> Arc<MemoryManager> {
    MemoryManager::start(ByteCount::mib(16)).expect("manager")
}

/// Connections are given up after a sixth of it.
fn config() -> PoolConfig {
    PoolConfig::new().cleaner(false).deadline(Duration::from_secs(18))
}

/// Where the server always answers: no connection is given up because others keep this process from running.
fn patient() -> PoolConfig {
    config().deadline(Duration::from_secs(360))
}

fn create(address: &str) -> Arc<BufferPool> {
    config().create(address, CAPACITY, &manager()).expect("a new table")
}

fn open(address: &str) -> farheap::Result<Arc<BufferPool>> {
    config().open(address, &manager())
}

fn server() -> (TestServer, String) {
    let server = TestServer::start(Announced::default());
    let address = server.address.to_string();
    (server, address)
}

fn fill(pool: &BufferPool) -> Vec<PageId> {
    let one = |_| {
        let mut page = pool.allocate().expect("a page");
        let id = page.id();
        page.fill(id.0 as u8);
        id
    };
    (0..PAGES).map(one).collect()
}

fn refill(pool: &BufferPool, pages: &[PageId], add: u8) {
    for page in pages {
        pool.fix_exclusive(*page).expect("a page").fill((page.0 as u8).wrapping_add(add));
    }
}

fn holds(pool: &BufferPool, page: PageId, add: u8) -> farheap::Result<bool> {
    let expected = (page.0 as u8).wrapping_add(add);
    Ok(pool.fix_shared(page)?.iter().all(|byte| *byte == expected))
}

fn assert_holds(pool: &BufferPool, pages: &[PageId], add: u8) {
    for page in pages {
        assert!(holds(pool, *page, add).expect("readable"), "{page}");
    }
}

fn until(what: &str, is_so: impl FnMut() -> bool) {
    assert!(eventually(is_so), "{what}");
}

fn open_error(opened: farheap::Result<Arc<BufferPool>>) -> String {
    opened.map(|pool| format!("{pool:?}")).expect_err("refused").to_string()
}

#[test]
fn a_table_is_opened_again_and_is_not_overwritten_by_mistake() {
    let (server, address) = server();
    let error = open_error(patient().open(&address, &manager()));
    assert!(error.contains("holds no table"), "{error}");
    let pool = patient().create(&address, CAPACITY, &manager()).expect("a new table");
    let pages = fill(&pool);
    pool.flush().expect("flushed");
    drop(pool);
    let text = server.control.memory()[..4096].to_vec();
    assert!(String::from_utf8_lossy(&text).contains(" closed by run "));
    for add in 0..2 {
        let pool = patient().open(&address, &manager()).expect("it is there");
        assert_eq!(pool.path().to_str(), Some(&address[..]));
        assert_holds(&pool, &pages, add);
        refill(&pool, &pages, add + 1);
        pool.flush().expect("flushed");
    }
    let error = open_error(patient().create(&address, CAPACITY, &manager()));
    assert!(error.contains("which would be lost") && error.contains("`overwrite`"), "{error}");
    let again = patient().overwrite(true).create(&address, CAPACITY, &manager());
    assert_eq!(again.expect("it may be lost").pages(), 2);
}

#[test]
fn what_cannot_hold_a_table_is_refused_with_what_to_do() {
    let (_server, address) = server();
    for (name, capacity, part) in [
        (format!("{address},{address},{address}?parity=1"), CAPACITY, "leave `parity` out"),
        (format!("{address},{address}"), CAPACITY, "is named twice"),
        (format!("{address},nbd://127.0.0.1:1/y"), CAPACITY, "cannot be used"),
        (address, ByteCount::mib(16), "are needed; use less of it"),
    ] {
        let error = open_error(config().create(name, capacity, &manager()));
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_table_on_two_servers_outlives_each_of_them_and_takes_a_new_one() {
    let [(a, first), (b, second), (c, third)] = [(); 3].map(|()| server());
    let both = format!("{first},{second}");
    let pool = config().create(&both, CAPACITY, &manager()).expect("a new table");
    let pages = fill(&pool);
    pool.flush().expect("flushed");
    b.control.kill(true);
    refill(&pool, &pages, 1);
    pool.flush().expect("the other one has it");
    pool.evict_all().expect("evicted");
    assert_holds(&pool, &pages, 1);
    drop(pool);
    b.control.revive();
    let error = open_error(open(&second));
    assert!(error.contains("may have gone on without it"), "{error}");
    // An export with data is not overwritten, one that is empty becomes a copy.
    let memory = c.control.memory();
    c.control.set_memory(vec![b'x'; memory.len()]);
    let new = format!("{first},{third}");
    let error = open_error(open(&new));
    assert!(error.contains("which would be lost"), "{error}");
    c.control.set_memory(memory);
    let pool = open(&new).expect("a copy, and a new one");
    // The copies that count, as a server's mark has them.
    let list = |memory: &[u8]| {
        let mark = String::from_utf8_lossy(&memory[..4096]).into_owned();
        mark.split_once(" of ").map(|(_, list)| list.trim_end_matches('\0').to_owned())
    };
    let is_copied = || {
        let [a, c] = [&a, &c].map(|server| server.control.memory());
        let does_count = list(&c).is_some_and(|list| !list.contains(":0"));
        a[8192..] == c[8192..] && list(&a) == list(&c) && does_count
    };
    until("it is copied", is_copied);
    drop(pool);
    until("both are closed", || {
        String::from_utf8_lossy(&c.control.memory()[..4096]).contains(" closed by run ")
    });
    let pool = open(&new).expect("two copies");
    a.control.kill(true);
    assert_holds(&pool, &pages, 1);
    refill(&pool, &pages, 2);
    pool.flush().expect("flushed");
    assert_holds(&pool, &pages, 2);
}

#[test]
fn a_second_opener_is_refused_while_the_first_lives() {
    let (_server, address) = server();
    let pool = patient().create(&address, CAPACITY, &manager()).expect("a new table");
    let pages = fill(&pool);
    let overwriting = patient().overwrite(true).create(&address, CAPACITY, &manager());
    for error in [
        open_error(patient().open(&address, &manager())),
        open_error(patient().read_only(true).open(&address, &manager())),
        open_error(overwriting),
    ] {
        assert!(error.contains("is open in another process"), "{error}");
    }
    pool.flush().expect("it is still its owner's");
    drop(pool);
    let reader = patient().read_only(true).open(&address, &manager()).expect("read only");
    assert_holds(&reader, &pages, 0);
    let second = patient().read_only(true).open(&address, &manager()).expect("two readers");
    assert_holds(&second, &pages, 0);
}

#[test]
fn an_owner_whose_export_is_taken_says_so_and_writes_nothing_more() {
    let (server, address) = server();
    let pool = create(&address);
    fill(&pool);
    pool.flush().expect("flushed");
    let mut memory = server.control.memory();
    memory[200] = b'x';
    server.control.set_memory(memory.clone());
    until("it notices", || pool.flush().is_err());
    until("it gives the server up", || {
        pool.allocate().expect("a page").fill(1);
        pool.evict_all().is_err()
    });
    let error = pool.evict_all().expect_err("it writes nothing").to_string();
    assert!(error.contains("write of"), "{error}");
    assert_eq!(server.control.memory()[..4096], memory[..4096], "the other's mark");
}

/// Not a test by itself: the process that is killed.
fn change_until_killed(address: &str) -> ! {
    let pool = create(address);
    let pages = fill(&pool);
    pool.flush().expect("flushed");
    println!("flushed {}", pages[0].0);
    for add in 0.. {
        refill(&pool, &pages, add);
        pool.evict_all().expect("evicted");
    }
    unreachable!("it is killed before")
}

#[test]
fn a_killed_process_leaves_a_table_that_opens_after_a_while() {
    const TEST: &str = "network::a_killed_process_leaves_a_table_that_opens_after_a_while";
    if let Some(address) = case(TEST) {
        change_until_killed(&address);
    }
    let (server, address) = server();
    let mut child = Victim::start(TEST, &address);
    let first: u64 = child.said("flushed ").expect("it flushes").parse().expect("a number");
    child.kill();
    let text = server.control.memory()[..4096].to_vec();
    assert!(String::from_utf8_lossy(&text).contains(" open by run "));
    let pool = open(&address).expect("nobody has it open any more");
    for page in (first..first + PAGES).map(PageId) {
        let byte = pool.fix_shared(page).expect("whole: the server was not killed")[0];
        assert!(holds(&pool, page, byte.wrapping_sub(page.0 as u8)).expect("readable"));
    }
    let pages: Vec<PageId> = (first..first + PAGES).map(PageId).collect();
    refill(&pool, &pages, 9);
    pool.flush().expect("flushed");
    drop(pool);
    assert_holds(&open(&address).expect("closed"), &pages, 9);
}

/// Not a test by itself: the process that is stopped. Has changed pages, which it writes when a file is there.
fn write_when_told(address: &str, path: &Path) {
    let pool = create(address);
    let pages = fill(&pool);
    pool.flush().expect("flushed");
    refill(&pool, &pages, 1);
    println!("changed {}", pages[0].0);
    while !path.exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("wrote {}", pool.evict_all().is_ok());
}

#[test]
fn a_process_that_was_stopped_for_long_does_not_write_over_its_successors_pages() {
    const TEST: &str =
        "network::a_process_that_was_stopped_for_long_does_not_write_over_its_successors_pages";
    if let Some(case) = case(TEST) {
        let (address, path) = case.split_once(' ').expect("two parts");
        return write_when_told(address, Path::new(path));
    }
    let (_server, address) = server();
    let dir = tempfile::tempdir().expect("a directory");
    let told = dir.path().join("told");
    let mut child = Victim::start(TEST, &format!("{address} {}", told.display()));
    let first: u64 = child.said("changed ").expect("it has pages").parse().expect("a number");
    child.stop();
    let pool = open(&address).expect("its owner is taken for dead");
    let pages: Vec<PageId> = (first..first + PAGES).map(PageId).collect();
    refill(&pool, &pages, 7);
    pool.evict_all().expect("written");
    std::fs::write(&told, "").expect("a file");
    child.resume();
    assert_eq!(child.said("wrote ").expect("it goes on"), "false");
    assert_holds(&pool, &pages, 7);
    pool.flush().expect("it is its owner's");
}

#[test]
fn a_flush_that_the_server_refuses_is_the_last_one() {
    let (server, address) = server();
    let pool = create(&address);
    let pages = fill(&pool);
    pool.flush().expect("flushed");
    refill(&pool, &pages, 1);
    server.control.plan(|asked| {
        if asked.command == FLUSH { Plan::Refuse(libc::EIO as u32) } else { Plan::Answer }
    });
    let error = pool.flush().expect_err("refused").to_string();
    assert!(error.contains("cannot be synced") && error.contains("from a log"), "{error}");
    server.control.behave();
    let error = pool.flush().expect_err("what was written is in doubt").to_string();
    assert!(error.contains("could not be synced before"), "{error}");
    assert_holds(&pool, &pages, 1);
}

#[test]
fn a_server_that_restarts_with_all_it_had_serves_on() {
    let (server, address) = server();
    let pool = create(&address);
    let pages = fill(&pool);
    pool.flush().expect("flushed");
    refill(&pool, &pages, 1);
    pool.evict_all().expect("written, and not flushed");
    server.control.kill(true);
    let error = pool.fix_shared(pages[0]).expect_err("nobody answers").to_string();
    assert!(error.contains("read of"), "{error}");
    let error = pool.flush().expect_err("nobody answers").to_string();
    assert!(error.contains("sync of") && !error.contains("from a log"), "{error}");
    server.control.revive();
    until("it is read again", || pool.fix_shared(pages[0]).is_ok());
    until("it is flushed", || pool.flush().is_ok());
    refill(&pool, &pages, 2);
    until("changes are written", || pool.flush().is_ok());
    drop(pool);
    assert_holds(&open(&address).expect("closed"), &pages, 2);
}

#[test]
fn a_server_that_restarts_without_what_was_not_flushed_is_found_out() {
    let (server, address) = server();
    let pool = create(&address);
    let pages = fill(&pool);
    pool.flush().expect("flushed");
    let flushed = server.control.memory();
    refill(&pool, &pages, 1);
    pool.evict_all().expect("written, and not flushed");
    server.control.kill(true);
    let mark_and_beat = server.control.memory()[..8192].to_vec();
    server.control.set_memory([&mark_and_beat, &flushed[8192..]].concat());
    server.control.revive();
    until("a page is not what was written", || {
        matches!(pool.fix_shared(pages[0]), Err(Error::Io { errno: libc::EBADMSG, .. }))
    });
    until("nor is the table durable", || {
        pool.flush().expect_err("lost").to_string().contains("from a log")
    });
    drop(pool);
    assert_holds(&open(&address).expect("as it was flushed"), &pages, 0);
}

#[test]
fn a_write_that_may_come_late_keeps_its_page_in_memory_and_every_flush_fails() {
    let (server, address) = server();
    let pool = create(&address);
    let pages = fill(&pool);
    pool.flush().expect("flushed");
    refill(&pool, &pages[..1], 1);
    // The server takes the write, and the connection breaks before it is done.
    server.control.plan(|asked| {
        let is_page = asked.command == WRITE && asked.offset >= 128 << 10;
        if is_page { Plan::Hold } else { Plan::Answer }
    });
    let error = pool.flush().expect_err("no answer").to_string();
    assert!(
        error.contains("may carry the write out later") && error.contains("start it anew"),
        "{error}"
    );
    server.control.behave();
    refill(&pool, &pages[1..], 2);
    refill(&pool, &pages[..1], 3);
    let error = pool.flush().expect_err("its place is not written again").to_string();
    assert!(error.contains("may carry the write out later"), "{error}");
    pool.evict_all().expect_err("the page cannot leave");
    assert_eq!(server.control.carry_out_held(), 1, "what was held");
    assert_holds(&pool, &pages[..1], 3);
    assert_holds(&pool, &pages[1..], 2);
    drop(pool);
    let text = server.control.memory()[..4096].to_vec();
    assert!(String::from_utf8_lossy(&text).contains(" open by run "), "not closed");
    // What the late write has left is a later state than that of the flush, and a whole one.
    let pool = open(&address).expect("after a while");
    assert_holds(&pool, &pages[..1], 1);
}

#[test]
fn a_read_that_the_server_refuses_is_an_error_until_it_does_not() {
    let (server, address) = server();
    let pool = create(&address);
    let pages = fill(&pool);
    pool.flush().expect("flushed");
    pool.evict_all().expect("evicted");
    server.control.plan(|asked| {
        if asked.command == READ { Plan::Refuse(libc::EIO as u32) } else { Plan::Answer }
    });
    let error = pool.fix_shared(pages[0]).expect_err("refused");
    assert!(matches!(error, Error::Io { op: "read", errno: libc::EIO, .. }), "{error}");
    server.control.behave();
    assert_holds(&pool, &pages, 0);
}

#[test]
fn a_table_on_nbdkit_outlives_its_server() {
    let dir = tempfile::tempdir().expect("a directory");
    let disk = dir.path().join("disk");
    std::fs::File::create(&disk).and_then(|file| file.set_len(64 << 20)).expect("a file");
    let file = format!("file={}", disk.display());
    let start = || nbdkit(dir.path(), &[], &["file", &file]);
    let Some(server) = start() else { return };
    let address = server.address.to_string();
    let pool = create(&address);
    let pages = fill(&pool);
    pool.flush().expect("flushed");
    refill(&pool, &pages, 1);
    pool.evict_all().expect("evicted");
    drop(server); // Killed.
    std::fs::remove_file(dir.path().join("nbd.sock")).expect("its socket");
    let _server = start().expect("it was there before");
    until("it serves again", || holds(&pool, pages[0], 1).is_ok());
    until("it is flushed", || pool.flush().is_ok());
    assert_holds(&pool, &pages, 1);
    drop(pool);
    assert_holds(&open(&address).expect("closed"), &pages, 1);
}
