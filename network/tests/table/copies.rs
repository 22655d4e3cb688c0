//! A table on several servers: who counts, who is left out, and who is filled.

use crate::common::{
    Announced, Asked, Dice, Page, Plan, READ, TestServer, WRITE, end_of, push, run,
};
use crate::{DEADLINE, PAGE, PAGES, START, Volatile, read, tended, until, write};
use farheap_nbd::{Client, Ending, MARK_LEN, NetworkError, ServerList, ServerState, ServerStats};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const FLUSH: u16 = 3;

fn some(count: usize) -> Vec<TestServer> {
    (0..count)
        .map(|_| TestServer::start(Announced { size: 9 << 20, ..Announced::default() }))
        .collect()
}

fn list_of(servers: &[&TestServer]) -> String {
    let addresses: Vec<_> = servers.iter().map(|server| server.address.to_string()).collect();
    addresses.join(",")
}

fn open_list(list: &str, run: u64) -> Result<Client, NetworkError> {
    open_within(list, run, DEADLINE)
}

fn open_within(list: &str, run: u64, deadline: Duration) -> Result<Client, NetworkError> {
    let client = tended(Client::of_table(&list.parse::<ServerList>()?, deadline)?);
    let pages = client.find_table()?.unwrap_or(PAGES);
    client.take_table(pages, Some(run))?;
    Ok(client)
}

fn open(servers: &[TestServer], run: u64) -> Client {
    open_list(&list_of(&servers.iter().collect::<Vec<_>>()), run).expect("a table")
}

fn refused(list: &str) -> String {
    open_list(list, 99).map(|client| format!("{client:?}")).expect_err("refused").to_string()
}

fn mark(server: &TestServer) -> String {
    mark_in(&server.control.memory())
}

fn mark_in(memory: &[u8]) -> String {
    String::from_utf8_lossy(&memory[..MARK_LEN]).trim_end_matches('\0').to_owned()
}

/// The generations in which the copies counted last, as a server's mark has them.
fn counted(server: &TestServer) -> Vec<u64> {
    counted_in(&server.control.memory())
}

fn counted_in(memory: &[u8]) -> Vec<u64> {
    let mark = mark_in(memory);
    let list = mark.split_once(" of ").expect("a table's mark").1;
    list.split_whitespace()
        .map(|copy| copy.split_once(':').expect("a copy").1.parse().expect("a number"))
        .collect()
}

/// True if the servers with these numbers are those that count, as the first one of them has it.
fn are_those(servers: &[TestServer], numbers: &[usize]) -> bool {
    let counted = counted(&servers[numbers[0]]);
    let newest = counted.iter().max().expect("a copy");
    (0..servers.len()).all(|at| (counted[at] == *newest) == numbers.contains(&at))
}

fn block(server: &TestServer, place: u64) -> u8 {
    server.control.memory()[START as usize + place as usize * PAGE]
}

/// The client dies, as far as servers can tell.
fn kill(client: Client, servers: &[TestServer]) {
    let memories: Vec<_> = servers.iter().map(|server| server.control.memory()).collect();
    drop(client);
    for (server, memory) in servers.iter().zip(memories) {
        server.control.behave();
        server.control.set_memory(memory);
    }
}

/// Calls a function for all cases at the same time: they wait for deadlines.
fn at_once<T: Send>(cases: impl IntoIterator<Item = T>, act: impl Fn(T) + Sync) {
    let act = &act;
    std::thread::scope(|threads| {
        for case in cases {
            threads.spawn(move || act(case));
        }
    });
}

fn is_page(asked: &Asked) -> bool {
    asked.command == WRITE && asked.offset >= START
}

fn is_mark(asked: &Asked) -> bool {
    asked.command == WRITE && asked.offset == 0
}

#[test]
fn a_write_and_a_flush_are_on_all_servers() {
    at_once(2..=3, |count| {
        let servers = some(count);
        let client = open(&servers, 7);
        assert_eq!(write(&client, 3, 5), Ending::Done);
        assert!(servers.iter().all(|server| block(server, 3) == 5));
        let flushes = Arc::new(AtomicU64::new(0));
        let last = &servers[count - 1].control;
        let of_server = Arc::clone(&flushes);
        last.plan(move |asked| {
            let is_flush = asked.command == FLUSH;
            of_server.fetch_add(u64::from(is_flush), Ordering::SeqCst);
            if is_flush { Plan::Await } else { Plan::Answer }
        });
        std::thread::scope(|scope| {
            let flush = scope.spawn(|| client.flush());
            until("the last one is asked", || flushes.load(Ordering::SeqCst) > 0);
            assert!(!flush.is_finished(), "the last one has not flushed");
            last.let_go();
            assert_eq!(flush.join().expect("a flush"), Ok(()));
        });
        drop(client);
        let closed = |server: &TestServer| mark(server).contains(" closed by run 7 ");
        assert!(servers.iter().all(closed));
        let client = open(&servers, 8);
        assert_eq!(read(&client, 3), (Ending::Done, 5));
        assert!(are_those(&servers, &(0..count).collect::<Vec<_>>()), "nobody is filled");
    });
}

#[test]
fn a_server_that_is_lost_is_left_out_and_filled_when_the_table_is_opened_again() {
    at_once(0..3, |lost| {
        let servers = some(3);
        let others: Vec<_> = (0..3).filter(|at| *at != lost).collect();
        let client = open(&servers, 7);
        assert_eq!(write(&client, 1, 1), Ending::Done);
        servers[lost].control.kill(true);
        assert_eq!(write(&client, 1, 2), Ending::Done);
        assert!(others.iter().all(|at| block(&servers[*at], 1) == 2));
        assert!(are_those(&servers, &others), "it is recorded before the write is done");
        assert_eq!(client.flush(), Ok(()));
        servers[lost].control.revive();
        assert_eq!(write(&client, 2, 3), Ending::Done);
        assert_eq!((block(&servers[lost], 1), block(&servers[lost], 2)), (1, 0), "it is not used");
        until("its tender tells", || client.stats()[lost].state == ServerState::Taken);
        drop(client);
        let client = open(&servers, 8);
        until("it counts again", || {
            are_those(&servers, &[0, 1, 2]) && counted(&servers[lost])[lost] > 0
        });
        assert_eq!((block(&servers[lost], 1), block(&servers[lost], 2)), (2, 3));
        for at in others {
            servers[at].control.kill(true);
        }
        until("it serves alone", || read(&client, 1) == (Ending::Done, 2));
        assert_eq!(write(&client, 1, 4), Ending::Done);
        assert_eq!(block(&servers[lost], 1), 4);
        assert_eq!(client.flush(), Ok(()));
    });
}

#[test]
fn no_write_is_done_before_it_is_recorded_who_misses_it() {
    let servers = some(2);
    let list = list_of(&[&servers[0], &servers[1]]);
    let client = open_within(&list, 7, DEADLINE * 20).expect("a table");
    assert_eq!(write(&client, 1, 1), Ending::Done);
    servers[1].control.plan(|asked| if is_page(asked) { Plan::Hang } else { Plan::Answer });
    let is_asked = Arc::new(AtomicBool::new(false));
    let of_server = Arc::clone(&is_asked);
    servers[0].control.plan(move |asked| {
        of_server.fetch_or(is_mark(asked), Ordering::SeqCst);
        if is_mark(asked) { Plan::Await } else { Plan::Answer }
    });
    let mut queue = client.open_queue(4).expect("a queue");
    let (offset, mut page) = (START + PAGE as u64, Page::of(2, PAGE));
    push(&mut queue, 7, false, offset, &mut page);
    until("the set is to be recorded", || {
        queue.wait(Duration::from_millis(5), &mut |end| panic!("{end:?}")).expect("a wait");
        is_asked.load(Ordering::SeqCst) && block(&servers[0], 1) == 2
    });
    assert!(are_those(&servers, &[0, 1]));
    servers[0].control.let_go();
    assert_eq!(end_of(&mut queue, false, offset, &page), Ending::Done);
    assert!(are_those(&servers, &[0]));
}

#[test]
fn a_client_that_dies_before_it_has_recorded_who_misses_a_write_has_not_promised_it() {
    let servers = some(2);
    let list = list_of(&[&servers[0], &servers[1]]);
    let client = open_within(&list, 7, DEADLINE * 20).expect("a table");
    assert_eq!(write(&client, 1, 1), Ending::Done);
    assert_eq!(client.flush(), Ok(()));
    servers[0].control.plan(|asked| if is_page(asked) { Plan::Hang } else { Plan::Answer });
    let is_asked = Arc::new(AtomicBool::new(false));
    let of_server = Arc::clone(&is_asked);
    servers[1].control.plan(move |asked| {
        of_server.fetch_or(is_mark(asked), Ordering::SeqCst);
        if is_mark(asked) { Plan::Hold } else { Plan::Answer }
    });
    let mut queue = client.open_queue(4).expect("a queue");
    let mut page = Page::of(2, PAGE);
    push(&mut queue, 7, false, START + PAGE as u64, &mut page);
    until("it waits for the record", || {
        queue.wait(Duration::from_millis(5), &mut |end| panic!("{end:?}")).expect("a wait");
        is_asked.load(Ordering::SeqCst)
    });
    let memories: Vec<_> = servers.iter().map(|server| server.control.memory()).collect();
    assert_eq!((block(&servers[0], 1), block(&servers[1], 1)), (1, 2), "they differ");
    drop(queue);
    drop(client);
    for (server, memory) in servers.iter().zip(memories) {
        server.control.behave();
        server.control.set_memory(memory);
    }
    for server in &servers {
        let error = refused(&list_of(&[server]));
        assert!(error.contains("may have gone on without it"), "{error}");
    }
    let client = open(&servers, 8);
    assert!(are_those(&servers, &[0]), "one counts, until the other one has what it has");
    let mut found = 0;
    until("they are equal again", || {
        found = read(&client, 1).1;
        are_those(&servers, &[0, 1]) && counted(&servers[1])[1] > 0
    });
    assert_eq!((found, block(&servers[0], 1), block(&servers[1], 1)), (1, 1, 1));
}

#[test]
fn a_table_is_not_opened_without_a_server_that_may_have_gone_on_alone() {
    let servers = some(2);
    drop(open(&servers, 7));
    let [a, b] = [&servers[0], &servers[1]];
    b.control.kill(true);
    let (list, alone) = (list_of(&[a, b]), list_of(&[a]));
    for list in [&list, &alone] {
        let error = refused(list);
        assert!(
            error.contains("may have gone on without it") && error.contains("`copies=`"),
            "{error}"
        );
        let names_other = error.contains(&b.address.to_string());
        assert_eq!(names_other, list.contains(','), "{error}");
    }
    assert!(counted(a) == [1, 1] && mark(a).contains(" closed by run 7 "), "nothing was written");
    let error = refused(&format!("{alone}?copies=2"));
    assert!(error.contains("number of servers"), "{error}");
    // It is lost for good, as its owner says.
    let client = open_list(&format!("{alone}?copies=1"), 8).expect("alone");
    assert_eq!(write(&client, 1, 2), Ending::Done);
    drop(client);
    drop(open_list(&list, 9).expect("the other one counts no more"));
    b.control.revive();
    let error = refused(&list_of(&[b]));
    assert!(error.contains("may have gone on without it"), "{error}");
    let client = open(&servers, 10);
    until("it is filled", || are_those(&servers, &[0, 1]) && block(b, 1) == 2);
    drop(client);
}

#[test]
fn servers_that_have_gone_on_without_each_other_are_refused_together() {
    let servers = some(2);
    drop(open(&servers, 7));
    for server in &servers {
        drop(open_list(&format!("{}?copies=1", list_of(&[server])), 8).expect("alone"));
    }
    let error = refused(&list_of(&[&servers[0], &servers[1]]));
    assert!(error.contains("has gone on without another server"), "{error}");
}

#[test]
fn what_one_server_cannot_read_comes_from_another() {
    let servers = some(2);
    let client = open(&servers, 7);
    assert_eq!(write(&client, 1, 1), Ending::Done);
    let before = servers[0].control.memory();
    for case in 0..2 {
        match case {
            0 => servers[0].control.plan(|asked| {
                let is_page = asked.command == READ && asked.offset >= START;
                if is_page { Plan::Refuse(5) } else { Plan::Answer }
            }),
            _ => {
                servers[0].control.behave();
                let mut memory = before.clone();
                memory[START as usize + PAGE..][..PAGE].fill(9);
                servers[0].control.set_memory(memory);
            }
        }
        for _ in 0..4 {
            assert_eq!(read(&client, 1), (Ending::Done, 1), "case {case}");
            let mut page = Page::of(0, PAGE);
            until("a connection", || {
                crate::common::read_now(&client, START + PAGE as u64, &mut page)
                    != Err(libc::ENOTCONN)
            });
            assert_eq!(page.0[0], 1, "case {case}");
        }
        assert!(client.stats()[0].errors > 0);
    }
    assert!(are_those(&servers, &[0, 1]));
}

#[test]
fn servers_that_restart_with_all_they_had_count_on() {
    let servers = some(2);
    let client = open(&servers, 7);
    assert_eq!(write(&client, 1, 1), Ending::Done);
    servers.iter().for_each(|server| server.control.kill(true));
    assert_eq!(client.flush(), Err(libc::ENOTCONN), "nobody answers");
    servers.iter().for_each(|server| server.control.revive());
    until("they serve again", || write(&client, 2, 2) == Ending::Done);
    until("they flush", || client.flush() == Ok(()));
    drop(client);
    let client = open(&servers, 8);
    assert_eq!((read(&client, 1), read(&client, 2)), ((Ending::Done, 1), (Ending::Done, 2)));
}

#[test]
fn a_server_that_lost_what_was_not_flushed_is_left_out_by_the_flush() {
    let servers = some(2);
    let client = open(&servers, 7);
    assert_eq!(write(&client, 1, 1), Ending::Done);
    assert_eq!(client.flush(), Ok(()));
    let before = servers[1].control.memory();
    assert_eq!(write(&client, 1, 2), Ending::Done);
    servers[1].control.kill(true);
    servers[1].control.set_memory(before);
    servers[1].control.revive();
    assert_eq!(client.flush(), Ok(()), "the other one has it");
    assert!(are_those(&servers, &[0]));
    assert_eq!(read(&client, 1), (Ending::Done, 2));
    // So has the other one, which is the last.
    servers[0]
        .control
        .plan(|asked| if asked.command == FLUSH { Plan::Refuse(5) } else { Plan::Answer });
    assert_eq!(client.flush(), Err(libc::EIO));
    servers[0].control.behave();
    assert_eq!(client.flush(), Err(libc::EIO), "as on one server");
}

#[test]
fn a_write_that_comes_late_to_a_server_that_was_left_out_is_read_by_nobody() {
    let servers = some(2);
    let client = open(&servers, 7);
    servers[1].control.plan(|asked| if is_page(asked) { Plan::Hold } else { Plan::Answer });
    assert_eq!(write(&client, 1, 1), Ending::Done, "the other one has it");
    servers[1].control.behave();
    assert_eq!(write(&client, 1, 2), Ending::Done, "and its place is used again");
    assert_eq!(servers[1].control.carry_out_held(), 1);
    for _ in 0..4 {
        assert_eq!(read(&client, 1), (Ending::Done, 2));
    }
    assert_eq!(client.flush(), Ok(()));
    drop(client);
    assert!(
        mark(&servers[0]).contains(" closed by run 7 ")
            && mark(&servers[1]).contains(" open by run 7 ")
    );
    let error = refused(&list_of(&[&servers[1]]));
    assert!(error.contains("may have gone on without it"), "{error}");
    let client = open(&servers, 8);
    until("it is filled", || are_those(&servers, &[0, 1]) && counted(&servers[1])[1] > 0);
    assert_eq!(block(&servers[1], 1), 2);
    drop(client);
}

#[test]
fn a_write_that_no_server_has_is_late_as_on_one_and_leaves_none_out() {
    let servers = some(2);
    let client = open(&servers, 7);
    assert_eq!(write(&client, 1, 1), Ending::Done);
    for server in &servers {
        server.control.plan(|asked| if is_page(asked) { Plan::Hold } else { Plan::Answer });
    }
    assert_eq!(write(&client, 1, 2), Ending::Late);
    servers.iter().for_each(|server| server.control.behave());
    assert_eq!(write(&client, 1, 3), Ending::Barred, "it is not written again");
    assert_eq!(write(&client, 2, 3), Ending::Done);
    assert!(are_those(&servers, &[0, 1]));
    servers[1].control.carry_out_held();
    drop(client);
    assert!(
        servers.iter().all(|server| mark(server).contains(" open by run 7 ")),
        "they may differ"
    );
}

#[test]
fn a_server_that_is_filled_counts_only_when_it_has_flushed() {
    let servers = some(2);
    let client = open(&servers, 7);
    for place in 0..64 {
        assert_eq!(write(&client, place, 1 + place as u8), Ending::Done);
    }
    kill(client, &servers);
    servers[1].control.plan(|asked| if is_page(asked) { Plan::Refuse(5) } else { Plan::Answer });
    let client = open(&servers, 8);
    assert!(are_those(&servers, &[0]) && counted(&servers[1])[1] == 0);
    // Before it counts, it is no copy: what it lacks is read from the other one, which cannot be left out.
    servers[0].control.kill(true);
    assert_eq!(read(&client, 5).0, Ending::Failed(libc::ENOTCONN));
    servers[0].control.revive();
    until("the other one is back", || read(&client, 5) == (Ending::Done, 6));
    let refused = Arc::new(AtomicBool::new(false));
    let of_server = Arc::clone(&refused);
    servers[1].control.plan(move |asked| {
        let is_flush = asked.command == FLUSH;
        of_server.fetch_or(is_flush, Ordering::SeqCst);
        if is_flush { Plan::Refuse(5) } else { Plan::Answer }
    });
    until("it is asked to flush", || refused.load(Ordering::SeqCst));
    until("it is left out", || client.stats()[1].state == ServerState::Taken);
    assert_eq!((client.flush(), write(&client, 5, 9)), (Ok(()), Ending::Done));
    assert!(counted(&servers[1])[1] == 0, "it has never counted");
    drop(client);
    assert!(are_those(&servers, &[0]));
}

#[test]
fn a_new_server_becomes_a_copy() {
    // The new one is taken first, and filled while the other one is being taken; or it is the second.
    for old in [1, 0] {
        let servers = some(2);
        let new = &servers[1 - old];
        let client = open(&servers[old..=old], 7);
        assert_eq!(write(&client, 1, 1), Ending::Done);
        drop(client);
        let client = open(&servers, 8);
        let counts = || counted(new).iter().all(|counted| *counted > 1);
        until("it counts", || block(new, 1) == 1 && counts());
        assert_eq!(counted(&servers[old]), counted(new), "the other one has recorded it before");
        drop(client);
        let error = refused(&list_of(&[&servers[old]]));
        assert!(error.contains("may have gone on without it"), "{error}");
    }
}

#[test]
fn no_server_is_filled_before_all_are_taken() {
    let servers = some(2);
    let list = list_of(&[&servers[0], &servers[1]]);
    let client = open(&servers, 7);
    servers[0].control.kill(true);
    assert_eq!(write(&client, 1, 1), Ending::Done);
    servers[0].control.revive();
    drop(client);
    // The one that is filled is the first to be taken. Its tender has turns while the other one still may be another's.
    let (turns, is_taken) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let of_first = Arc::clone(&turns);
    servers[0].control.plan(move |asked| {
        let is_beat = asked.command == WRITE && asked.offset == MARK_LEN as u64;
        of_first.fetch_add(u64::from(is_beat), Ordering::SeqCst);
        Plan::Answer
    });
    let (of_second, too_soon) = (Arc::clone(&is_taken), Arc::new(AtomicBool::new(false)));
    let seen = Arc::clone(&too_soon);
    servers[1].control.plan(move |asked| {
        let is_fill = asked.command == READ && asked.offset >= START;
        seen.fetch_or(is_fill && !of_second.load(Ordering::SeqCst), Ordering::SeqCst);
        if is_mark(asked) && !of_second.load(Ordering::SeqCst) { Plan::Await } else { Plan::Answer }
    });
    std::thread::scope(|scope| {
        let opener = scope.spawn(|| open_within(&list, 8, DEADLINE * 20).expect("a table"));
        until("turns of its tender", || turns.load(Ordering::SeqCst) >= 3);
        is_taken.store(true, Ordering::SeqCst);
        servers[1].control.let_go();
        let client = opener.join().expect("an opener");
        assert!(!too_soon.load(Ordering::SeqCst), "it was read while it was another's");
        until("it is filled", || are_those(&servers, &[0, 1]) && block(&servers[0], 1) == 1);
        drop(client);
    });
}

#[test]
fn who_cannot_take_all_servers_has_not_gone_on_without_the_others() {
    at_once([true, false], |is_closed| {
        let servers = some(2);
        let [a, b] = [&servers[0], &servers[1]];
        let client = open(&servers, 7);
        assert_eq!((write(&client, 1, 1), client.flush()), (Ending::Done, Ok(())));
        if is_closed {
            drop(client)
        } else {
            kill(client, &servers)
        }
        b.control.plan(|asked| if is_mark(asked) { Plan::Refuse(5) } else { Plan::Answer });
        // The first copy is taken first, in whatever order they are named; if it was not closed, the first that is named counts.
        let error = refused(&list_of(&if is_closed { [b, a] } else { [a, b] }));
        assert!(error.contains("cannot be taken"), "{error}");
        b.control.behave();
        assert!(mark(a).contains(" open by run 99 ") && mark(b).contains(" by run 7 "));
        assert_eq!((counted(a), counted(b)), (vec![1, 1], vec![1, 1]), "closed: {is_closed}");
        // As its owner would, who was taken for dead.
        let client = open_list(&format!("{}?copies=1", list_of(&[b])), 8).expect("alone");
        assert_eq!(write(&client, 1, 2), Ending::Done);
        drop(client);
        let client = open(&servers, 9);
        until("it is filled", || are_those(&servers, &[0, 1]) && block(a, 1) == 2);
        drop(client);
    });
}

#[test]
fn several_owners_at_the_same_time_are_one_at_most() {
    let servers = some(2);
    drop(open(&servers, 99));
    let lists = [list_of(&[&servers[0], &servers[1]]), list_of(&[&servers[1], &servers[0]])];
    let opened: Vec<_> = std::thread::scope(|scope| {
        let openers: Vec<_> = (1..=4)
            .map(|run| {
                let list = &lists[run as usize % 2];
                scope.spawn(move || open_list(list, run))
            })
            .collect();
        openers.into_iter().map(|opener| opener.join().expect("an opener")).collect()
    });
    let owners: Vec<_> = opened.iter().flatten().collect();
    assert!(owners.len() <= 1, "{} owners", owners.len());
    if let Some(owner) = owners.first() {
        let mut queue = owner.open_queue(4).expect("a queue");
        assert_eq!(run(&mut queue, false, START, &mut Page::of(1, PAGE)), Ending::Done);
    }
    drop(opened);
    open(&servers, 100);
}

/// True if each copy that counts, by what servers have after a power cut, holds what it may.
fn is_promised(servers: &[Volatile], allowed: &[Vec<u8>]) -> bool {
    let durable: Vec<_> =
        servers.iter().map(|server| server.durable.lock().expect("unpoisoned").clone()).collect();
    let own = |at: usize| counted_in(&durable[at])[at];
    let newest = (0..servers.len()).map(own).max();
    (0..servers.len()).filter(|at| Some(own(*at)) == newest).all(|at| {
        let is_there = |(place, allowed): (usize, &Vec<u8>)| {
            allowed.contains(&durable[at][START as usize + place * PAGE])
        };
        allowed.iter().enumerate().all(is_there)
    })
}

#[test]
fn what_a_flush_has_promised_outlives_the_power_of_each_copy_that_counts() {
    const BLOCKS: usize = crate::BLOCKS as usize;
    let seed = crate::seed();
    let mut dice = Dice(seed);
    let (mut flushes, mut left_out) = (0, 0);
    for round in 0..8 {
        let servers: Vec<_> = (0..2 + round % 2).map(|_| Volatile::start()).collect();
        servers.iter().for_each(|server| server.behave(dice.roll(), 100));
        let tests: Vec<_> = servers.iter().map(|server| &server.server).collect();
        let list: ServerList = list_of(&tests).parse().expect("addresses");
        let client = tended(Client::of_table(&list, DEADLINE).expect("a table's servers"));
        client.find_table().expect("nobody has it open");
        client.take_table(START..START + (BLOCKS * PAGE) as u64, Some(7)).expect("taken");
        assert_eq!(client.flush(), Ok(()), "round {round}");
        let mut blocks = vec![vec![0]; BLOCKS];
        let mut queue = client.open_queue(4).expect("a queue");
        for step in 0..60 {
            let (at, byte) = (dice.below(BLOCKS as u64) as usize, dice.roll() as u8);
            let (allowed, offset) = (&mut blocks[at], START + (at * PAGE) as u64);
            let struck = &servers[dice.below(servers.len() as u64) as usize];
            match dice.below(12) {
                0 => {
                    let flushed = client.flush();
                    flushes += u32::from(flushed.is_ok());
                    assert!(
                        flushed.is_err() || is_promised(&servers, &blocks),
                        "round {round}, step {step}"
                    );
                }
                1 if step % 6 == 0 => struck.fail(),
                2 if step % 6 == 0 => struck.server.control.kill(false),
                1..=7 => match run(&mut queue, false, offset, &mut Page::of(byte, PAGE)) {
                    Ending::Done => *allowed = vec![byte],
                    Ending::Failed(_) | Ending::Late | Ending::Barred => allowed.push(byte),
                },
                _ => {
                    let mut page = Page::of(!byte, PAGE);
                    let end = run(&mut queue, true, offset, &mut page);
                    let is_right = allowed.contains(&page.0[0]);
                    assert!(end != Ending::Done || is_right, "round {round}, step {step}");
                }
            }
        }
        let is_left_out = |stats: &ServerStats| stats.state == ServerState::Taken;
        left_out += client.stats().iter().filter(|stats| is_left_out(stats)).count();
    }
    println!("{flushes} flushes, {left_out} servers left out");
    assert!(flushes > 0 && left_out > 0, "it tests nothing");
}
