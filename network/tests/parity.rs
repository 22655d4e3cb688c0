//! Pages with parity: what is lost with a server is computed from the others.

mod common;

use common::{
    Announced, Dice, PATIENCE, PATIENT, Page, Plan, QUICK, READ, TRIM, TestServer, WRITE, client,
    end_of, mark, push, run, striped, until_done,
};
use farheap_nbd::{Client, Ending, NbdEnd, NbdQueue, ServerAddress};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

fn content(place: u64, version: u64) -> Page {
    let mut dice = Dice(place << 32 | version);
    Page((0..PAGE / 8).flat_map(|_| dice.roll().to_ne_bytes()).collect())
}

fn servers(count: usize) -> (Vec<TestServer>, Vec<ServerAddress>) {
    sized(count, Announced::default().size)
}

fn sized(count: usize, size: u64) -> (Vec<TestServer>, Vec<ServerAddress>) {
    let start = |_| TestServer::start(Announced { size, ..Announced::default() });
    let servers: Vec<_> = (0..count).map(start).collect();
    let addresses = servers.iter().map(|server| server.address.clone()).collect();
    (servers, addresses)
}

/// Runs requests of places together; returns their ends in order.
fn run_all(queue: &mut NbdQueue, is_read: bool, places: &[u64], pages: &mut [Page]) -> Vec<Ending> {
    let mut ends = vec![None; places.len()];
    let start = Instant::now();
    for (token, (place, page)) in places.iter().zip(pages).enumerate() {
        push(queue, token as u64, is_read, place * PAGE as u64, page);
    }
    while ends.iter().any(Option::is_none) {
        assert!(start.elapsed() < PATIENCE, "it hangs");
        let mut done = |end: NbdEnd| {
            assert!(ends[end.token as usize].replace(end.ending).is_none(), "reported twice");
        };
        queue.wait(Duration::from_millis(50), &mut done).expect("a wait");
    }
    ends.into_iter().flatten().collect()
}

fn write(queue: &mut NbdQueue, places: &[u64], version: u64) {
    for places in places.chunks(16) {
        let mut pages: Vec<Page> = places.iter().map(|place| content(*place, version)).collect();
        let ends = run_all(queue, false, places, &mut pages);
        assert!(ends.iter().all(|end| *end == Ending::Done), "{places:?}: {ends:?}");
    }
}

/// Reads as often as the pager does: until the bytes come, which are right then.
fn check(queue: &mut NbdQueue, places: &[u64], version: u64) {
    let start = Instant::now();
    let mut left = places.to_vec();
    while !left.is_empty() {
        assert!(start.elapsed() < PATIENCE, "{left:?} of version {version} do not come back");
        let some: Vec<u64> = left.drain(..left.len().min(16)).collect();
        let mut pages: Vec<Page> = some.iter().map(|_| Page::of(0x55, PAGE)).collect();
        let ends = run_all(queue, true, &some, &mut pages);
        for ((end, place), page) in ends.iter().zip(&some).zip(&pages) {
            match end {
                Ending::Done => {
                    assert!(page.0 == content(*place, version).0, "place {place}, {version}");
                }
                _ => left.push(*place),
            }
        }
    }
}

fn until(what: &str, client: &Client, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}: {:?}", client.stats());
        // Statistics tell nobody that they have changed.
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn places(count: u64) -> Vec<u64> {
    // No neighbours.
    (0..count).map(|n| n * 3).collect()
}

#[test]
fn what_is_written_with_parity_is_read_in_whichever_parts() {
    for (parity, count) in [(1, 3), (1, 5), (2, 4), (2, 6)] {
        let (_servers, addresses) = servers(count);
        let client = striped(&addresses, parity, PATIENT);
        let mut queue = client.open_queue(8).expect("a queue");
        let mut dice = Dice(count as u64);
        let mut model = vec![0_u8; 2 << 20];
        let blocks = (model.len() / PAGE) as u64;
        for round in 0..200 {
            let len = 1 + dice.below(64);
            let first = dice.below(blocks - len);
            let range = first as usize * PAGE..(first + len) as usize * PAGE;
            let is_read = dice.below(2) == 0;
            let fill = dice.roll() as u8;
            let mut page = Page(model[range.clone()].to_vec());
            if !is_read {
                page.0.iter_mut().enumerate().for_each(|(n, byte)| *byte = fill ^ (n / 64) as u8);
                model[range.clone()].copy_from_slice(&page.0);
            } else {
                page.0.fill(0x55);
            }
            let offset = first * PAGE as u64;
            assert_eq!(run(&mut queue, is_read, offset, &mut page), Ending::Done, "round {round}");
            assert!(page.0 == model[range.clone()], "round {round} of parity {parity} of {count}");
            if round % 16 == 0 {
                client.trim(offset, len * PAGE as u64).expect("no server is asked");
                model[range].fill(0);
            }
        }
        client.flush().expect("flushed");
        let is_late = |server: &farheap_nbd::ServerStats| server.hedges > 0;
        assert!(client.stats().iter().all(|server| server.rebuilt == 0 || is_late(server)));
    }
}

#[test]
fn a_page_is_read_by_one_request() {
    let (servers, addresses) = servers(6);
    let client = striped(&addresses, 2, PATIENT);
    let mut queue = client.open_queue(16).expect("a queue");
    let places = places(64);
    write(&mut queue, &places, 1);
    let reads = Arc::new(AtomicU64::new(0));
    for server in &servers {
        let reads = Arc::clone(&reads);
        server.control.plan(move |asked| {
            let is_page = asked.command == READ && asked.offset > 0;
            reads.fetch_add(u64::from(is_page), Ordering::SeqCst);
            Plan::Answer
        });
    }
    check(&mut queue, &places, 1);
    // But where a server is slow: four more, or instead of the one.
    let hedges: u64 = client.stats().iter().map(|server| server.hedges).sum();
    let reads = reads.load(Ordering::SeqCst);
    assert!((64 - hedges.min(64)..=64 + 4 * hedges).contains(&reads), "{reads}, {hedges} hedges");
}

#[test]
fn as_many_servers_may_die_as_there_is_parity_and_writes_go_on() {
    for (parity, count) in [(1, 3), (2, 5)] {
        let (servers, addresses) = servers(count);
        let client = striped(&addresses, parity, QUICK);
        mark(&client);
        let mut queue = client.open_queue(16).expect("a queue");
        let places = places(200);
        write(&mut queue, &places, 1);
        servers[..parity].iter().for_each(|server| server.control.kill(true));
        check(&mut queue, &places, 1);
        assert!(client.stats().iter().any(|server| server.rebuilt > 0), "{:?}", client.stats());
        // What is written meanwhile survives the loss of others, once these are back.
        write(&mut queue, &places[..100], 2);
        servers[..parity].iter().for_each(|server| server.control.revive());
        until("they are back", &client, || {
            client.stats()[..parity].iter().all(|server| server.connections > 0)
        });
        check(&mut queue, &places[..100], 2);
        servers[parity..2 * parity].iter().for_each(|server| server.control.kill(true));
        check(&mut queue, &places[..100], 2);
        check(&mut queue, &places[100..], 1);
    }
}

#[test]
fn a_page_of_too_many_dead_servers_is_an_error_until_they_return() {
    let (servers, addresses) = servers(3);
    let client = striped(&addresses, 1, QUICK);
    mark(&client);
    let mut queue = client.open_queue(16).expect("a queue");
    let places = places(16);
    write(&mut queue, &places, 1);
    servers[1..].iter().for_each(|server| server.control.kill(true));
    let mut pages: Vec<Page> = places.iter().map(|_| Page::of(0, PAGE)).collect();
    let ends = run_all(&mut queue, true, &places, &mut pages);
    for ((place, end), page) in places.iter().zip(&ends).zip(&pages) {
        assert!(*end != Ending::Done || page.0 == content(*place, 1).0, "place {place}");
    }
    assert!(ends.iter().any(|end| matches!(end, Ending::Failed(_))), "{ends:?}");
    let mut page = content(90, 1);
    assert!(matches!(run(&mut queue, false, 90 * PAGE as u64, &mut page), Ending::Failed(_)));
    servers.iter().for_each(|server| server.control.revive());
    check(&mut queue, &places, 1);
}

#[test]
fn a_stopped_server_holds_nobody_up_for_long_and_loses_nothing() {
    let (servers, addresses) = servers(4);
    let client = striped(&addresses, 1, QUICK);
    let mut queue = client.open_queue(16).expect("a queue");
    let places = places(60);
    write(&mut queue, &places, 1);
    servers[2].control.pause(true);
    write(&mut queue, &places[..30], 2);
    check(&mut queue, &places[..30], 2);
    check(&mut queue, &places[30..], 1);
    servers[2].control.pause(false);
    write(&mut queue, &places[30..], 3);
    check(&mut queue, &places[..30], 2);
    check(&mut queue, &places[30..], 3);
}

#[test]
fn a_write_that_comes_late_reaches_nothing_that_is_in_use() {
    let (servers, addresses) = servers(3);
    let client = striped(&addresses, 1, QUICK);
    let mut queue = client.open_queue(16).expect("a queue");
    let places = places(16);
    write(&mut queue, &places, 1);
    servers[0].control.plan(|asked| if asked.command == WRITE { Plan::Hold } else { Plan::Answer });
    write(&mut queue, &places, 2);
    servers[0].control.behave();
    let barred = client.stats()[0].barred;
    assert!(barred > 0, "{:?}", client.stats());
    // As often as all rows are used again, those that are free again.
    for version in 3..40 {
        write(&mut queue, &places, version);
    }
    assert!(servers[0].control.carry_out_held() > 0);
    check(&mut queue, &places, 39);
    for other in &servers[1..] {
        other.control.kill(true);
        check(&mut queue, &places, 39);
        other.control.revive();
        until("it is back", &client, || {
            client.stats().iter().all(|server| server.state == farheap_nbd::ServerState::Up)
        });
        check(&mut queue, &places, 39);
    }
    assert_eq!(client.stats()[0].barred, barred);
}

#[test]
fn what_a_server_lost_that_began_anew_is_written_anew() {
    let (servers, addresses) = servers(4);
    let client = striped(&addresses, 1, QUICK);
    mark(&client);
    let mut queue = client.open_queue(16).expect("a queue");
    let places = places(300);
    write(&mut queue, &places, 1);
    for lost in 0..2 {
        let control = &servers[lost].control;
        control.kill(true);
        control.set_memory(vec![0; Announced::default().size as usize]);
        control.revive();
        // All pages have their parity again: the next server may go.
        until("it is mended", &client, || {
            let stats = client.stats();
            stats[lost].copied > 0 && stats[lost].lacking == 0
        });
        check(&mut queue, &places, 1);
    }
    servers[2].control.kill(true);
    check(&mut queue, &places, 1);
}

#[test]
fn what_a_server_lacks_of_spans_that_are_given_up_is_not_missed() {
    let (servers, addresses) = servers(4);
    let client = striped(&addresses, 1, QUICK);
    mark(&client);
    let mut queue = client.open_queue(16).expect("a queue");
    let places = places(60);
    servers[0].control.plan(|asked| if asked.command == WRITE { Plan::Hold } else { Plan::Answer });
    write(&mut queue, &places, 1);
    servers[0].control.behave();
    assert!(client.stats()[0].barred > 0, "{:?}", client.stats());
    let control = &servers[1].control;
    control.kill(true);
    control.set_memory(vec![0; Announced::default().size as usize]);
    control.revive();
    until("it is mended", &client, || {
        let stats = client.stats();
        stats[1].copied > 0 && stats[1].lacking == 0
    });
    check(&mut queue, &places, 1);
}

#[test]
fn bytes_that_a_server_changes_are_computed_from_the_others() {
    for (parity, count) in [(1, 3), (2, 4)] {
        let (servers, addresses) = servers(count);
        let client = striped(&addresses, parity, QUICK);
        mark(&client);
        let mut queue = client.open_queue(16).expect("a queue");
        let places = places(100);
        write(&mut queue, &places, 1);
        let old = servers[..parity].iter().map(|server| server.control.memory());
        let old: Vec<_> = old.collect();
        write(&mut queue, &places, 2);
        // They come back with what they had some time ago, and their marks.
        for (server, memory) in servers.iter().zip(old) {
            server.control.set_memory(memory);
        }
        check(&mut queue, &places, 2);
        assert!(client.stats()[0].rebuilt > 0, "{:?}", client.stats());
        // Not even a handler of signals sees others.
        let mut page = Page::of(0, PAGE);
        for place in &places {
            common::read_now(&client, place * PAGE as u64, &mut page).expect("computed");
            assert!(page.0 == content(*place, 2).0, "place {place}");
        }
    }
}

#[test]
fn space_of_pages_that_were_written_again_is_used_again() {
    let (_servers, addresses) = sized(3, 3 << 20);
    let client = striped(&addresses, 1, PATIENT);
    let mut queue = client.open_queue(16).expect("a queue");
    let count = client.capacity() / PAGE as u64;
    let all: Vec<u64> = (0..count).collect();
    write(&mut queue, &all, 1);
    let mut versions = vec![1; count as usize];
    let mut dice = Dice(7);
    for version in 2..300 {
        let mut some = Vec::new();
        for _ in 0..1 + dice.below(16) {
            let place = dice.below(count);
            if !some.contains(&place) {
                some.push(place);
            }
        }
        write(&mut queue, &some, version);
        some.iter().for_each(|place| versions[*place as usize] = version);
    }
    for place in all {
        check(&mut queue, &[place], versions[place as usize]);
    }
}

#[test]
fn threads_write_and_read_while_spans_are_emptied_and_servers_die() {
    let (servers, addresses) = sized(4, 8 << 20);
    let client = striped(&addresses, 1, QUICK);
    mark(&client);
    let threads = 3;
    // Some spans are barred by writes that are lost with their connections.
    let each = client.capacity() / PAGE as u64 / threads * 6 / 10;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let client = &client;
            scope.spawn(move || {
                let mut queue = client.open_queue(16).expect("a queue");
                let mut dice = Dice(thread);
                let mut versions = vec![0; each as usize];
                for version in 1..400 {
                    let first = dice.below(each - 16);
                    let places: Vec<u64> = (first..first + 16).map(|n| thread * each + n).collect();
                    let mut pages: Vec<Page> =
                        places.iter().map(|place| content(*place, version)).collect();
                    let ends = run_all(&mut queue, false, &places, &mut pages);
                    for (n, end) in (first..).zip(ends) {
                        assert!(!matches!(end, Ending::Late | Ending::Barred));
                        // What failed is of either version, or of none.
                        versions[n as usize] = if end == Ending::Done { version } else { 0 };
                    }
                    let at = dice.below(each);
                    if versions[at as usize] > 0 {
                        let place = thread * each + at;
                        let mut page = Page::of(0, PAGE);
                        until_done(&mut queue, true, place * PAGE as u64, &mut page);
                        let version = versions[at as usize];
                        assert!(page.0 == content(place, version).0, "{place}, {version}");
                    }
                }
            });
        }
        for server in servers.iter().cycle().take(6) {
            // Some requests are served, and some not: how many does not matter.
            std::thread::sleep(Duration::from_millis(100));
            server.control.kill(true);
            // As above.
            std::thread::sleep(Duration::from_millis(50));
            server.control.revive();
        }
    });
}

#[test]
fn space_that_ran_out_without_a_server_is_there_again_when_it_returns() {
    let (servers, addresses) = sized(3, 3 << 20);
    let client = striped(&addresses, 1, QUICK);
    mark(&client);
    let mut queue = client.open_queue(16).expect("a queue");
    let all: Vec<u64> = (0..client.capacity() / PAGE as u64).collect();
    write(&mut queue, &all, 1);
    servers[0].control.kill(true);
    let mut versions = vec![1; all.len()];
    let mut dice = Dice(5);
    // A row has room for one page instead of two.
    let (mut has_room, mut version) = (true, 1);
    while has_room {
        version += 1;
        let first = dice.below(all.len() as u64 - 16);
        let places: Vec<u64> = (first..first + 16).collect();
        let mut pages: Vec<Page> = places.iter().map(|place| content(*place, version)).collect();
        for (place, end) in places.iter().zip(run_all(&mut queue, false, &places, &mut pages)) {
            has_room &= end == Ending::Done;
            // What failed is as it was.
            if end == Ending::Done {
                versions[*place as usize] = version;
            }
        }
    }
    servers[0].control.revive();
    for place in &all {
        let version = versions[*place as usize] + 1;
        let mut page = content(*place, version);
        until_done(&mut queue, false, place * PAGE as u64, &mut page);
        versions[*place as usize] = version;
    }
    for place in all {
        check(&mut queue, &[place], versions[place as usize]);
    }
}

#[test]
fn a_server_that_began_anew_is_written_to_at_once() {
    let (servers, addresses) = servers(3);
    let client = Client::connect_striped(&addresses, 1, QUICK).expect("connected");
    // No mover: the span that is open lacks rows.
    for at in 0..addresses.len() {
        let tender = client.tender(at, Box::new(|text| println!("{text}")));
        std::thread::spawn(move || tender.run());
    }
    mark(&client);
    let mut queue = client.open_queue(16).expect("a queue");
    write(&mut queue, &[0], 1);
    for server in &servers {
        let (control, lacking) = (&server.control, client.stats());
        control.kill(true);
        control.set_memory(vec![0; Announced::default().size as usize]);
        control.revive();
        check(&mut queue, &[0], 1);
        until("it is back", &client, || {
            client.stats().iter().zip(&lacking).any(|(now, old)| now.lacking > old.lacking)
        });
        // Two columns, of which one is shorter.
        for version in 2..5 {
            write(&mut queue, &[2, 4, 6], version);
            check(&mut queue, &[2, 4, 6], version);
        }
        write(&mut queue, &[0], 1);
    }
}

#[test]
fn what_more_servers_lost_than_there_is_parity_is_an_error_not_zeros() {
    for (parity, count) in [(1, 3), (2, 5)] {
        let (servers, addresses) = servers(count);
        let client = striped(&addresses, parity, QUICK);
        mark(&client);
        let mut queue = client.open_queue(16).expect("a queue");
        let places = places(100);
        write(&mut queue, &places, 1);
        for server in &servers[..=parity] {
            server.control.kill(true);
            server.control.set_memory(vec![0; Announced::default().size as usize]);
        }
        servers[..=parity].iter().for_each(|server| server.control.revive());
        let mut lost = 0;
        let start = Instant::now();
        // They are back one after the other, and what is not lost is moved.
        while lost == 0
            || client.stats().iter().filter(|server| server.connections > 0).count() <= parity
        {
            assert!(start.elapsed() < PATIENCE, "{:?}", client.stats());
            for place in &places {
                let mut page = Page::of(0, PAGE);
                let end = run(&mut queue, true, place * PAGE as u64, &mut page);
                let is_right = page.0 == content(*place, 1).0;
                assert!(is_right || end != Ending::Done, "place {place}");
                let now = common::read_now(&client, place * PAGE as u64, &mut page);
                assert!(page.0 == content(*place, 1).0 || now.is_err(), "place {place}");
                lost += u64::from(end != Ending::Done);
            }
        }
        // What is written from now on is there, once the queue has connections of its own again.
        for place in &places {
            until_done(&mut queue, false, place * PAGE as u64, &mut content(*place, 2));
        }
        check(&mut queue, &places, 2);
    }
}

#[test]
fn an_export_that_another_client_took_is_neither_read_nor_written() {
    let (servers, addresses) = servers(4);
    let client = striped(&addresses, 1, QUICK);
    mark(&client);
    let mut queue = client.open_queue(16).expect("a queue");
    let places = places(100);
    write(&mut queue, &places, 1);
    let others: Vec<u8> = (0..Announced::default().size).map(|at| (at / 512) as u8 | 1).collect();
    servers[1].control.kill(true);
    servers[1].control.set_memory(others.clone());
    servers[1].control.revive();
    for version in 2..12 {
        check(&mut queue, &places, version - 1);
        write(&mut queue, &places, version);
    }
    until("it is seen", &client, || client.stats()[1].state == farheap_nbd::ServerState::Taken);
    check(&mut queue, &places, 11);
    assert!(servers[1].control.memory() == others, "it was written to");
}

#[test]
fn layouts_that_cannot_be_are_refused_with_the_reason() {
    let (_servers, addresses) = servers(4);
    for (count, parity, reason) in [
        (2, 1, "2 servers are not 3 to 8"),
        (3, 2, "3 servers are not 4 to 8"),
        (4, 3, "parity of 3 servers is not 1 to 2"),
        (4, 0, "parity of 0 servers is not 1 to 2"),
    ] {
        let refused = Client::connect_striped(&addresses[..count], parity, PATIENT);
        let error = refused.expect_err("refused").to_string();
        assert!(error.contains(reason), "{error}");
    }
    let twins = [&addresses[..2], &addresses[..1]].concat();
    let error = Client::connect_striped(&twins, 1, PATIENT).expect_err("refused").to_string();
    assert!(error.contains("is named twice"), "{error}");
    // Four hold copies as before.
    assert_eq!(client(&addresses, PATIENT).tenders(), 4);
}

#[test]
fn what_stopped_servers_have_is_computed_before_their_connections_are_given_up() {
    for (parity, count) in [(1, 4), (2, 6)] {
        let (servers, addresses) = servers(count);
        let client = striped(&addresses, parity, PATIENT);
        let mut queue = client.open_queue(16).expect("a queue");
        let places = places(240);
        write(&mut queue, &places, 1);
        servers[..parity].iter().for_each(|server| server.control.pause(true));
        check(&mut queue, &places, 1);
        check(&mut queue, &places, 1);
        servers[..parity].iter().for_each(|server| server.control.pause(false));
        // It would have taken a minute to give them up.
        let stats = client.stats();
        assert!(stats.iter().all(|server| server.breaks == 0), "{stats:?}");
        assert!(stats[0].hedges > 0 && stats[0].rebuilt > 0, "{stats:?}");
        let before = stats[0].reads;
        let start = Instant::now();
        while client.stats()[0].reads == before {
            assert!(start.elapsed() < PATIENCE, "it is not asked again: {:?}", client.stats());
            check(&mut queue, &places, 1);
        }
        write(&mut queue, &places, 2);
        check(&mut queue, &places, 2);
    }
}

#[test]
fn more_reads_than_servers_have_places_for_wait_for_each_other() {
    let (servers, addresses) = servers(3);
    let client = striped(&addresses, 1, QUICK);
    mark(&client);
    let mut queue = client.open_queue(256).expect("a queue");
    let places = places(256);
    write(&mut queue, &places, 1);
    for round in 0..16 {
        // Half of the rounds are computed.
        servers[0].control.pause(round % 2 == 1);
        let mut pages: Vec<Page> = places.iter().map(|_| Page::of(0x55, PAGE)).collect();
        let ends = run_all(&mut queue, true, &places, &mut pages);
        servers[0].control.pause(false);
        for ((end, place), page) in ends.iter().zip(&places).zip(&pages) {
            assert!(*end == Ending::Done && page.0 == content(*place, 1).0, "{place}: {end:?}");
        }
    }
}

/// The server that has a block's first version, and where it is there.
fn place_at(servers: &[TestServer], block: u64) -> (usize, u64) {
    let first = content(block, 1).0;
    let place_in = |(at, server): (usize, &TestServer)| {
        let row = server.control.memory().chunks(PAGE).position(|page| page == first)?;
        Some((at, (row * PAGE) as u64))
    };
    servers.iter().enumerate().find_map(place_in).expect("written")
}

#[test]
fn a_slow_read_is_computed_within_the_bound() {
    let (servers, addresses) = servers(4);
    let client = striped(&addresses, 1, PATIENT);
    let mut queue = client.open_queue(16).expect("a queue");
    let places = places(240);
    write(&mut queue, &places, 1);
    check(&mut queue, &places, 1);
    // Not the first read that comes: that may be left of what was computed while this process was stopped.
    let (own, offset) = place_at(&servers, places[0]);
    servers[own].control.plan(move |asked| {
        let range = asked.offset..asked.offset + u64::from(asked.len);
        let is_slow = asked.command == READ && range.contains(&offset);
        if is_slow { Plan::Await } else { Plan::Answer }
    });
    let before = client.stats()[own];
    check(&mut queue, &places[..1], 1);
    servers[own].control.let_go();
    let after = client.stats()[own];
    let is_computed = after.hedges > before.hedges && after.rebuilt > before.rebuilt;
    assert!(is_computed, "{before:?}, then {after:?}");
    check(&mut queue, &places, 1);
}

#[test]
fn a_read_whose_answer_has_come_is_not_asked_for_elsewhere() {
    let (_servers, addresses) = servers(4);
    let client = striped(&addresses, 1, PATIENT);
    let places = places(240);
    let mut queue = client.open_queue(16).expect("a queue");
    write(&mut queue, &places, 1);
    let hedges = || client.stats().iter().map(|server| server.hedges).sum::<u64>();
    let (start, mut is_spared) = (Instant::now(), false);
    while !is_spared {
        assert!(start.elapsed() < PATIENCE, "{:?}", client.stats());
        // Reads that are not late, so that the one below is.
        check(&mut queue, &places, 1);
        let (before, mut page) = (hedges(), Page::of(0, PAGE));
        // The first read of a queue may be asked for elsewhere if it is late.
        let mut queue = client.open_queue(1).expect("a queue");
        push(&mut queue, 7, true, 0, &mut page);
        queue.submit();
        // The answer comes meanwhile, and late by then; where the machine is busy it may not have come: another round.
        let late = client.stats().iter().map(|server| server.read_p95).max();
        std::thread::sleep(2 * late.unwrap_or_default() + Duration::from_millis(20));
        assert_eq!(end_of(&mut queue, true, 0, &page), Ending::Done);
        is_spared = hedges() == before;
    }
}

/// Writes four rows of four blocks, of which the first four blocks are on one server, and are computed two by two. Changes
/// all bytes of that server behind the client's back; returns its number, and where the first row is.
fn write_and_change(servers: &[TestServer], queue: &mut NbdQueue) -> (usize, u64) {
    let all: Vec<u64> = (0..16).collect();
    write(queue, &all, 1);
    check(queue, &[0], 1);
    let (own, row) = place_at(servers, 0);
    let mut memory = servers[own].control.memory();
    memory[PAGE..].iter_mut().for_each(|byte| *byte ^= 1);
    servers[own].control.set_memory(memory);
    (own, row)
}

#[test]
fn what_was_computed_is_computed_again_when_its_server_writes_over_it() {
    let (servers, addresses) = servers(5);
    let client = striped(&addresses, 1, PATIENT);
    let mut queue = client.open_queue(16).expect("a queue");
    let (own, row) = write_and_change(&servers, &mut queue);
    let reads = |server: usize| client.stats()[server].reads;
    for (at, server) in servers.iter().enumerate() {
        server.control.plan(move |asked| {
            let is_page = asked.command == READ && asked.offset > 0;
            let is_second = is_page && asked.offset > row;
            if at == own && is_page || is_second { Plan::Await } else { Plan::Answer }
        });
    }
    let mut page = Page::of(0, 4 * PAGE);
    push(&mut queue, 7, true, 0, &mut page);
    let (start, mut end) = (Instant::now(), None);
    let mut is_let_go = false;
    while end.is_none() {
        assert!(start.elapsed() < PATIENCE, "it hangs: {:?}", client.stats());
        let mut done = |ended: NbdEnd| end = Some(ended.ending);
        queue.wait(Duration::from_millis(5), &mut done).expect("a wait");
        if client.stats()[own].rebuilt == 2 && !is_let_go {
            // Two are computed: now the server's own bytes come, which are others.
            is_let_go = true;
            let answered = reads(own);
            servers[own].control.let_go();
            while reads(own) == answered {
                let mut none = |_| panic!("it is not computed yet");
                queue.wait(Duration::from_millis(5), &mut none).expect("a wait");
            }
            servers.iter().for_each(|server| server.control.let_go());
        }
    }
    assert!(is_let_go && end == Some(Ending::Done), "{:?}", client.stats());
    let right: Vec<u8> = (0..4).flat_map(|place| content(place, 1).0).collect();
    assert!(page.0 == right, "bytes of the server");
}

#[test]
fn what_was_computed_is_not_written_over_by_part_of_an_answer() {
    let (servers, addresses) = servers(5);
    let client = striped(&addresses, 1, PATIENT);
    let mut queue = client.open_queue(16).expect("a queue");
    let (own, row) = write_and_change(&servers, &mut queue);
    let may_send = Arc::new(AtomicBool::new(false));
    for (at, server) in servers.iter().enumerate() {
        let may_send = Arc::clone(&may_send);
        server.control.plan(move |asked| {
            let is_page = asked.command == READ && asked.offset > 0;
            if at == own && is_page {
                while !may_send.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                return Plan::Half;
            }
            if is_page && asked.offset > row { Plan::Await } else { Plan::Answer }
        });
    }
    let mut page = Page::of(0, 4 * PAGE);
    push(&mut queue, 7, true, 0, &mut page);
    let (start, mut end) = (Instant::now(), None);
    let mut looks = 0;
    while end.is_none() {
        assert!(start.elapsed() < PATIENCE, "it hangs: {:?}", client.stats());
        let mut done = |ended: NbdEnd| end = Some(ended.ending);
        queue.wait(Duration::from_millis(5), &mut done).expect("a wait");
        // Two are computed: now two come of the server's own, which are others.
        may_send.fetch_or(client.stats()[own].rebuilt == 2, Ordering::SeqCst);
        looks += u32::from(servers[own].control.has_sent_half());
        if looks == 20 {
            let others = servers.iter().enumerate().filter(|(at, _)| *at != own);
            others.for_each(|(_, server)| server.control.let_go());
        }
    }
    assert!(looks >= 20 && end == Some(Ending::Done), "{:?}", client.stats());
    let right: Vec<u8> = (0..4).flat_map(|place| content(place, 1).0).collect();
    assert!(page.0 == right, "bytes of the server");
}

/// Bytes that a server holds which are not zeros, but for its mark.
fn held(server: &TestServer) -> usize {
    let memory = server.control.memory();
    memory[PAGE..].chunks(PAGE).filter(|page| page.iter().any(|byte| *byte != 0)).count() * PAGE
}

#[test]
fn space_of_what_nobody_needs_goes_back_to_the_servers() {
    let (servers, addresses) = sized(4, 8 << 20);
    let client = striped(&addresses, 1, PATIENT);
    mark(&client);
    let mut queue = client.open_queue(16).expect("a queue");
    let all: Vec<u64> = (0..4000).collect();
    write(&mut queue, &all, 1);
    let before: Vec<usize> = servers.iter().map(held).collect();
    assert!(before.iter().all(|bytes| *bytes >= 4000 / 3 * PAGE * 3 / 4), "{before:?}");
    // Neighbours: whole spans are free at once.
    client.trim(2000 * PAGE as u64, 2000 * PAGE as u64).expect("trimmed");
    let is_at_most = |percent: usize| {
        servers.iter().zip(&before).all(|(server, before)| held(server) * 100 <= before * percent)
    };
    until("half of it is given back", &client, || is_at_most(60));
    // Three of four: no span is free before what is left has moved together, once nobody writes.
    let (kept, others): (Vec<u64>, Vec<u64>) =
        all[..2000].iter().partition(|place| *place % 4 == 0);
    others.iter().for_each(|place| client.trim(place * PAGE as u64, PAGE as u64).expect("trimmed"));
    until("what is left is moved together", &client, || is_at_most(45));
    check(&mut queue, &kept, 1);
    client.trim(0, 4000 * PAGE as u64).expect("trimmed");
    until("nothing is left but an open span or two", &client, || {
        servers.iter().all(|server| held(server) <= 2 * 32 * PAGE)
    });
}

#[test]
fn a_trim_that_comes_late_reaches_nothing_that_is_in_use() {
    let (servers, addresses) = sized(3, 3 << 20);
    let client = striped(&addresses, 1, QUICK);
    mark(&client);
    let mut queue = client.open_queue(16).expect("a queue");
    let count = client.capacity() / PAGE as u64 / 3;
    let all: Vec<u64> = (0..count).collect();
    write(&mut queue, &all, 1);
    servers[0].control.plan(|asked| if asked.command == TRIM { Plan::Hold } else { Plan::Answer });
    client.trim(0, count * PAGE as u64).expect("trimmed, or lost");
    servers[0].control.behave();
    assert!(client.stats()[0].barred > 0, "{:?}", client.stats());
    for version in 2..20 {
        write(&mut queue, &all, version);
    }
    assert!(servers[0].control.carry_out_held() > 0);
    servers[1].control.kill(true);
    check(&mut queue, &all, 19);
}
