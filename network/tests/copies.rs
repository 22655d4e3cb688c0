//! The same bytes on several servers: what is left when one goes, and what one gets that comes back.

mod common;

use common::{
    Announced, Asked, PATIENCE, PATIENT, Page, Plan, QUICK, READ, TestServer, WRITE, client, run,
    until_done,
};
use farheap_nbd::{Client, Ending, NbdQueue, NbdTimes, ServerState, ServerStats};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

fn two() -> [TestServer; 2] {
    [(); 2].map(|()| TestServer::start(Announced::default()))
}

fn client_of(servers: &[TestServer], times: NbdTimes) -> Client {
    let addresses: Vec<_> = servers.iter().map(|server| server.address.clone()).collect();
    let client = client(&addresses, times);
    common::mark(&client);
    client
}

fn write_all(queue: &mut NbdQueue, pages: u64, byte: u8) {
    for page in 1..=pages {
        assert_eq!(run(queue, false, page * PAGE as u64, &mut Page::of(byte, PAGE)), Ending::Done);
    }
}

fn assert_all(queue: &mut NbdQueue, pages: u64, byte: u8) {
    for page in 1..=pages {
        let mut found = Page::of(!byte, PAGE);
        assert_eq!(run(queue, true, page * PAGE as u64, &mut found), Ending::Done, "page {page}");
        assert!(found.0.iter().all(|found| *found == byte), "page {page}");
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_write_is_on_all_servers_when_it_is_done() {
    let servers = two();
    let client = client_of(&servers, PATIENT);
    let mut queue = client.open_queue(4).expect("a queue");
    write_all(&mut queue, 8, 7);
    for server in &servers {
        assert!(server.control.memory()[PAGE..9 * PAGE].iter().all(|byte| *byte == 7));
    }
}

#[test]
fn one_server_may_go_at_any_time_and_gets_what_it_missed() {
    for at in 0..2 {
        let servers = two();
        let client = client_of(&servers, QUICK);
        let mut queue = client.open_queue(4).expect("a queue");
        write_all(&mut queue, 32, 1);
        servers[at].control.kill(true);
        write_all(&mut queue, 16, 2);
        assert_all(&mut queue, 16, 2);
        assert!(servers[at].control.memory()[PAGE..17 * PAGE].contains(&1));
        servers[at].control.revive();
        until("it comes back", || client.stats()[at].state == ServerState::Up);
        until("it has got what it missed", || {
            let stats = client.stats()[at];
            stats.lacking == stats.barred
        });
        assert!(client.stats()[at].copied > 0, "{:?}", client.stats());
        until("both are connected", || {
            let mut page = Page::of(0, PAGE);
            assert_eq!(run(&mut queue, true, PAGE as u64 * 20, &mut page), Ending::Done);
            client.stats()[at].reads > 0 || at == 1
        });
        servers[1 - at].control.kill(true);
        // What was on its way when the first one broke is on the other one only.
        let barred = client.stats()[at].barred / PAGE as u64;
        assert!(barred <= 1, "{barred} pages");
        until("only the other one is asked", || {
            let mut page = Page::of(0, PAGE);
            run(&mut queue, true, 3 * PAGE as u64, &mut page) == Ending::Done
        });
        let mut page = Page::of(0, PAGE);
        until_done(&mut queue, true, 20 * PAGE as u64, &mut page);
        for page in 2..=16 {
            let mut found = Page::of(0, PAGE);
            assert_eq!(run(&mut queue, true, page * PAGE as u64, &mut found), Ending::Done);
            assert!(found.0.iter().all(|byte| *byte == 2), "page {page}");
        }
    }
}

#[test]
fn a_stopped_server_delays_a_write_by_the_time_for_silence_only() {
    let servers = two();
    let client = client_of(&servers, QUICK);
    let mut queue = client.open_queue(4).expect("a queue");
    write_all(&mut queue, 1, 1);
    servers[0].control.pause(true);
    write_all(&mut queue, 4, 2);
    assert_all(&mut queue, 4, 2);
    servers[0].control.pause(false);
}

#[test]
fn a_stopped_server_is_waited_for_once_by_all_connections_together() {
    let servers = two();
    // Only the server that is stopped falls silent for so long.
    let client = client_of(&servers, NbdTimes { stall: Duration::from_secs(2), ..PATIENT });
    let mut queues: Vec<NbdQueue> =
        (0..3).map(|_| client.open_queue(4).expect("a queue")).collect();
    let mut write_and_trim = |byte| {
        // Each its own page: where a late write may come there is no other.
        for (at, queue) in queues.iter_mut().enumerate() {
            let place = ((1 + at) * PAGE) as u64;
            assert_eq!(run(queue, false, place, &mut Page::of(byte, PAGE)), Ending::Done);
        }
        client.trim(5 * PAGE as u64, PAGE as u64).expect("a server trims");
    };
    write_and_trim(1);
    servers[0].control.pause(true);
    write_and_trim(2);
    let stats = client.stats();
    assert_eq!((stats[0].breaks, stats[1].breaks), (1, 0), "{stats:?}");
    servers[0].control.pause(false);
}

#[test]
fn a_server_that_began_anew_is_filled_and_then_counts() {
    let servers = two();
    let client = client_of(&servers, QUICK);
    let mut queue = client.open_queue(4).expect("a queue");
    write_all(&mut queue, 32, 3);
    servers[1].control.kill(true);
    servers[1].control.set_memory(vec![0; 16 << 20]);
    servers[1].control.revive();
    // The mark is looked at when a connection is made.
    until("it is found out", || {
        let mut page = Page::of(3, PAGE);
        let _ = run(&mut queue, false, PAGE as u64 * 40, &mut page);
        client.stats()[1].copied > 0
    });
    until("it has got all", || {
        let stats = client.stats()[1];
        stats.lacking == stats.barred
    });
    // But for what was being copied while its connections broke: that may arrive late, and is not sent again.
    let memory = servers[1].control.memory();
    let lacks = |page: &usize| memory[page * PAGE..(page + 1) * PAGE].iter().any(|byte| *byte != 3);
    let missing = ((1..33).filter(lacks).count() * PAGE) as u64;
    assert!(missing <= client.stats()[1].barred, "{missing} bytes missing, {:?}", client.stats());
}

#[test]
fn a_server_that_began_anew_beside_a_write_is_not_taken_to_have_it() {
    const FAR: usize = 8 << 20; // No copy of the first pages has it.
    let servers = two();
    let client = client_of(&servers, PATIENT);
    let mut queue = client.open_queue(4).expect("a queue");
    write_all(&mut queue, 4, 1);
    let is_it = |asked: &Asked| asked.command == WRITE && asked.offset == FAR as u64;
    servers[1].control.plan(move |asked| if is_it(asked) { Plan::Await } else { Plan::Answer });
    let before = client.stats()[0].writes;
    let mut page = Page::of(2, PAGE);
    common::push(&mut queue, 7, false, FAR as u64, &mut page);
    let mut end = None;
    let wait = |queue: &mut NbdQueue, end: &mut Option<Ending>| {
        let mut done = |ended: farheap_nbd::NbdEnd| *end = Some(ended.ending);
        queue.wait(Duration::from_millis(5), &mut done).expect("a wait");
    };
    until("the first server has answered", || {
        wait(&mut queue, &mut end);
        client.stats()[0].writes > before
    });
    servers[0].control.kill(true);
    servers[0].control.set_memory(vec![0; 16 << 20]);
    servers[0].control.revive();
    until("it is found out", || client.stats()[0].copied > 0);
    assert_eq!(end, None);
    servers[1].control.let_go();
    until("the write ends", || {
        wait(&mut queue, &mut end);
        end.is_some()
    });
    assert_eq!(end, Some(Ending::Done));
    until("the first server has got it", || {
        servers[0].control.memory()[FAR..FAR + PAGE].iter().all(|byte| *byte == 2)
    });
}

#[test]
fn a_connection_that_outlives_what_its_server_held_is_made_anew() {
    let servers = two();
    let client = client_of(&servers, PATIENT);
    let mut queue = client.open_queue(4).expect("a queue");
    write_all(&mut queue, 4, 3);
    servers[0].control.set_memory(vec![0; 16 << 20]);
    until("it is found out, and filled", || {
        let stats = client.stats()[0];
        stats.copied > 0 && stats.lacking == 0
    });
    servers[1].control.kill(true);
    let mut found = Page::of(0, PAGE);
    until_done(&mut queue, true, PAGE as u64, &mut found);
    assert!(found.0.iter().all(|byte| *byte == 3));
}

#[test]
fn of_many_that_find_a_server_anew_one_marks_it() {
    let servers = two();
    let client = client_of(&servers, PATIENT);
    servers[0].control.kill(true);
    servers[0].control.set_memory(vec![0; 16 << 20]);
    let marks = Arc::new(AtomicU64::new(0));
    let of_server = Arc::clone(&marks);
    servers[0].control.plan(move |asked| {
        if asked.command == WRITE && asked.offset == 0 && asked.len as usize == PAGE {
            of_server.fetch_add(1, Ordering::SeqCst);
        }
        // So that all have looked before one has marked it, if they are let.
        if asked.command == READ { Plan::Slowly(200) } else { Plan::Answer }
    });
    servers[0].control.revive();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| client.open_queue(1).expect("a queue"));
        }
    });
    assert_eq!(marks.load(Ordering::SeqCst), 1);
}

#[test]
fn a_page_that_is_read_again_comes_from_the_other_server() {
    let servers = two();
    let client = client_of(&servers, PATIENT);
    let mut queue = client.open_queue(4).expect("a queue");
    write_all(&mut queue, 4, 3);
    // As a server with damaged memory.
    let mut memory = servers[0].control.memory();
    memory[PAGE..].fill(9);
    servers[0].control.set_memory(memory);
    let of_all = |count: fn(&ServerStats) -> u64| client.stats().iter().map(count).sum::<u64>();
    for page in 1..=4 {
        let mut found = [Page::of(0, PAGE), Page::of(0, PAGE)];
        // A read that is slow asks both at once, and one of the answers comes later: then once more.
        until("two reads that are not slow", || {
            queue.wait(Duration::ZERO, &mut |_| ()).expect("a wait");
            if of_all(|server| server.in_flight) > 0 {
                return false;
            }
            let hedges = of_all(|server| server.hedges);
            found.iter_mut().for_each(|into| {
                assert_eq!(run(&mut queue, true, page * PAGE as u64, into), Ending::Done);
            });
            of_all(|server| server.hedges) == hedges
        });
        let is_there = |byte| found.iter().any(|page| page.0[0] == byte);
        assert!(is_there(3) && is_there(9), "page {page} came from one server twice");
    }
}

#[test]
fn a_slow_read_is_asked_for_elsewhere_within_the_bound() {
    let servers = two();
    let client = client_of(&servers, PATIENT);
    let mut queue = client.open_queue(4).expect("a queue");
    write_all(&mut queue, 1, 3);
    for n in 0..200 {
        assert_eq!(
            run(&mut queue, true, PAGE as u64 * (1 + n % 64), &mut Page::of(0, PAGE)),
            Ending::Done
        );
    }
    let is_first = Arc::new(AtomicBool::new(true));
    for server in &servers {
        let is_first = Arc::clone(&is_first);
        server.control.plan(move |asked| {
            // (What is at the start is the mark.)
            let is_page = asked.command == READ && asked.offset > 0;
            let is_slow = is_page && is_first.swap(false, Ordering::SeqCst);
            if is_slow { Plan::Await } else { Plan::Answer }
        });
    }
    let mut page = Page::of(0, PAGE);
    assert_eq!(run(&mut queue, true, PAGE as u64, &mut page), Ending::Done);
    servers.iter().for_each(|server| server.control.let_go());
    let stats = client.stats();
    let hedges: u64 = stats.iter().map(|stats| stats.hedges).sum();
    assert!((1..=11).contains(&hedges), "{hedges}");
    let is_ordered =
        |stats: &ServerStats| stats.read_p50 <= stats.read_p95 && stats.read_p95 <= stats.read_p99;
    assert!(stats.iter().all(is_ordered), "{stats:?}");
    assert!(stats.iter().any(|stats| !stats.read_p50.is_zero()), "{stats:?}");
}

#[test]
fn an_error_of_one_server_is_none_while_another_has_the_bytes() {
    let servers = two();
    let client = client_of(&servers, PATIENT);
    let mut queue = client.open_queue(4).expect("a queue");
    servers[0]
        .control
        .plan(|asked| if asked.command == READ { Plan::Refuse(5) } else { Plan::Refuse(28) });
    write_all(&mut queue, 4, 6);
    assert_all(&mut queue, 4, 6);
    servers[1].control.plan(|_| Plan::Refuse(5));
    let mut page = Page::of(0, PAGE);
    assert_eq!(run(&mut queue, true, PAGE as u64, &mut page), Ending::Failed(libc::EIO));
    assert_eq!(client.stats()[0].barred, 0);
}

#[test]
fn a_stopped_server_is_read_around_before_its_connection_is_given_up() {
    for at in 0..2 {
        let servers = two();
        let client = client_of(&servers, PATIENT);
        let mut queue = client.open_queue(4).expect("a queue");
        write_all(&mut queue, 64, 3);
        servers[at].control.pause(true);
        for _ in 0..4 {
            assert_all(&mut queue, 64, 3);
        }
        let stats = client.stats();
        assert!(stats.iter().all(|server| server.breaks == 0), "{stats:?}");
        servers[at].control.pause(false);
        assert_all(&mut queue, 64, 3);
    }
}

#[test]
fn reads_that_a_slow_server_keeps_leave_room_for_as_many_as_before() {
    for at in 0..2 {
        let servers = two();
        let client = client_of(&servers, PATIENT);
        let mut queue = client.open_queue(4).expect("a queue");
        write_all(&mut queue, 64, 3);
        // So many that more of them may be asked for twice than there are places.
        for _ in 0..16 {
            assert_all(&mut queue, 64, 3);
        }
        let control = &servers[at].control;
        control.plan(|asked| if asked.command == READ { Plan::Await } else { Plan::Answer });
        for _ in 0..4 {
            assert_all(&mut queue, 64, 3);
        }
        control.let_go();
        assert_all(&mut queue, 64, 3);
    }
}
