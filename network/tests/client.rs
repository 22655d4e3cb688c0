//! One server: what it answers, what it does wrong, and what becomes of the requests.

#![expect(unsafe_code, reason = "pushes buffers of tests")]

#[path = "common/certificates.rs"]
mod certificates;
mod common;

use certificates::{Activated, Authority, nbdkit_tls, secured_address};
use common::{
    Announced, Dice, PATIENCE, PATIENT, Page, Plan, QUICK, READ, TestServer, WRITE, client, nbdkit,
    push, run, until_done,
};
use farheap_nbd::{Client, Ending, NbdEnd, NbdTimes, ServerAddress, ServerState};
use std::collections::HashMap;
use std::io::Write as _;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

/// Writes and reads of many lengths at once, whose bytes are compared.
fn exercise(client: &Client, seed: u64, rounds: u64) {
    let mut dice = Dice(seed);
    let mut queue = client.open_queue(32).expect("a queue");
    let places = client.capacity() / (256 << 10);
    let mut model = HashMap::new();
    for round in 0..rounds {
        let mut pages = Vec::new();
        let mut taken = Vec::new();
        while queue.in_flight() < 32 && taken.len() < places as usize {
            let place = dice.below(places);
            if taken.contains(&place) {
                continue;
            }
            taken.push(place);
            let len = PAGE << dice.below(7);
            let (byte, is_read) = (dice.roll() as u8, dice.below(2) == 0);
            let known = model.get(&place).copied();
            let (len, byte) = if is_read { known.unwrap_or((len, 0)) } else { (len, byte) };
            let mut page = Page::of(if is_read { !byte } else { byte }, len);
            let buffers = page.buffers(1 << dice.below(3));
            // SAFETY: the pages live until the loop below has seen all ends.
            let pushed = unsafe {
                queue.push(pages.len() as u64, is_read, place * (256 << 10), buffers.into_iter())
            };
            assert!(pushed);
            if !is_read {
                model.insert(place, (len, byte));
            }
            pages.push((page, byte));
        }
        let (start, count) = (Instant::now(), pages.len());
        let mut ended = 0;
        while ended < count {
            assert!(start.elapsed() < PATIENCE, "round {round} hangs");
            let mut done = |end: NbdEnd| {
                assert_eq!(end.ending, Ending::Done, "round {round}, {end:?}");
                ended += 1;
            };
            queue.wait(Duration::from_millis(50), &mut done).expect("a wait");
        }
        for (page, byte) in &pages {
            assert!(page.0.iter().all(|found| found == byte), "round {round}");
        }
    }
}

#[test]
fn what_is_written_is_read_with_chunks_and_without() {
    for is_chunked in [true, false] {
        let server = TestServer::start(Announced { is_chunked, ..Announced::default() });
        exercise(&client(std::slice::from_ref(&server.address), PATIENT), 1, 40);
    }
}

#[test]
fn what_is_written_to_nbdkit_is_read_again() {
    for options in [&[][..], &["--no-sr"], &["--filter=delay", "--threads=16"]] {
        let dir = tempfile::tempdir().expect("a directory");
        let delays =
            if options.len() > 1 { &["delay-read=1ms", "delay-write=2ms"][..] } else { &[] };
        let plugin = [&["memory", "16M"][..], delays].concat();
        let Some(server) = nbdkit(dir.path(), options, &plugin) else { return };
        let client = client(std::slice::from_ref(&server.address), PATIENT);
        exercise(&client, 2, 40);
        client.flush().expect("flushed");
        client.trim(0, 1 << 20).expect("trimmed");
    }
}

#[test]
fn what_is_written_by_tls_is_read_again() {
    let authority = Authority::new();
    let certificates = authority.make("localhost", &["127.0.0.1"], false);
    let Some(server) = nbdkit_tls(&certificates, &["--tls-verify-peer"]) else { return };
    let client = client(&[server.address(&certificates)], PATIENT);
    exercise(&client, 3, 120);
    client.flush().expect("flushed");
    client.trim(0, 1 << 20).expect("trimmed");
    assert_eq!(client.stats()[0].breaks, 0, "{:?}", client.stats());
}

#[test]
fn long_writes_by_tls_are_as_short_ones() {
    let authority = Authority::new();
    let certificates = authority.make("localhost", &["127.0.0.1"], false);
    let Some(server) = nbdkit_tls(&certificates, &[]) else { return };
    let client = client(&[server.address(&certificates)], PATIENT);
    let mut queue = client.open_queue(8).expect("a queue");
    let mut pages: Vec<Page> = (0..8).map(|byte| Page::of(byte, 1 << 20)).collect();
    for round in 0..40 {
        for (place, page) in (0..).zip(&mut pages) {
            push(&mut queue, place, round % 2 == 1, place << 20, page);
        }
        while queue.in_flight() > 0 {
            let mut done = |end: NbdEnd| assert_eq!(end.ending, Ending::Done, "round {round}");
            queue.wait(Duration::from_millis(50), &mut done).expect("a wait");
        }
    }
    assert_eq!(client.stats()[0].breaks, 0);
}

#[test]
fn what_is_written_by_tls_to_qemu_is_read_again() {
    let authority = Authority::new();
    let certificates = authority.make("localhost", &["127.0.0.1"], false);
    let disk = certificates.join("disk");
    std::fs::File::create(&disk).and_then(|file| file.set_len(64 << 20)).expect("a file");
    let mut server = Activated::new();
    let tls = format!(
        "tls-creds-x509,id=tls,endpoint=server,verify-peer=yes,dir={}",
        certificates.display()
    );
    let disk = disk.display().to_string();
    let arguments =
        ["--object", &tls, "--tls-creds=tls", "--shared=0", "--persistent", "--format=raw", &disk];
    let Some(()) = server.start("qemu-nbd", &arguments) else { return };
    let client = client(&[server.address(&certificates)], PATIENT);
    exercise(&client, 4, 60);
    client.flush().expect("flushed");
    assert_eq!(client.stats()[0].breaks, 0, "{:?}", client.stats());
}

#[test]
fn a_connection_by_tls_is_made_anew() {
    let authority = Authority::new();
    let certificates = authority.make("localhost", &["127.0.0.1"], false);
    let Some(mut server) = nbdkit_tls(&certificates, &[]) else { return };
    let client = client(&[server.address(&certificates)], PATIENT);
    let mut queue = client.open_queue(4).expect("a queue");
    assert_eq!(run(&mut queue, false, 0, &mut Page::of(1, PAGE)), Ending::Done);
    // Certificates are read anew, too.
    let renewed = authority.make("renewed", &["127.0.0.1"], false);
    for name in ["client-cert.pem", "client-key.pem"] {
        std::fs::copy(renewed.join(name), certificates.join(name)).expect("copied");
    }
    let path = format!("--tls-certificates={}", certificates.display());
    let arguments = ["--foreground", "--tls=require", &path, "--tls-verify-peer", "memory", "64M"];
    server.start("nbdkit", &arguments).expect("it is installed");
    // A write that found out that the connection is gone would have barred its place.
    until_done(&mut queue, true, 0, &mut Page::of(0, PAGE));
    let mut page = Page::of(2, PAGE);
    until_done(&mut queue, false, 8192, &mut page);
    let mut page = Page::of(0, PAGE);
    until_done(&mut queue, true, 8192, &mut page);
    assert!(page.0.iter().all(|byte| *byte == 2));
}

#[test]
fn a_server_that_is_not_who_it_should_be_is_refused_with_the_reason() {
    let (authority, other) = (Authority::new(), Authority::new());
    let ours = authority.make("ours", &["127.0.0.1"], false);
    let expired = authority.make("expired", &["127.0.0.1"], true);
    let elsewhere = authority.make("elsewhere", &["memory.example"], false);
    let foreign = other.make("foreign", &["127.0.0.1"], false);
    let refusal = |address: &ServerAddress| {
        let refused = Client::connect(std::slice::from_ref(address), PATIENT);
        refused.expect_err("refused").to_string()
    };
    for (of_server, reason) in [
        (&foreign, "signed by none of"),
        (&expired, "its certificate has expired"),
        (&elsewhere, "memory.example, not for 127.0.0.1"),
    ] {
        let Some(server) = nbdkit_tls(of_server, &[]) else { return };
        let error = refusal(&server.address(&ours));
        assert!(error.contains(reason) && error.starts_with("nbds://127.0.0.1:"), "{error}");
    }
    // The other way round: one that demands certificates, and believes none of these.
    let Some(server) = nbdkit_tls(&ours, &["--tls-verify-peer"]) else { return };
    let nameless = authority.make("nameless", &["127.0.0.1"], false);
    std::fs::remove_file(nameless.join("client-cert.pem")).expect("removed");
    std::fs::copy(ours.join("ca-cert.pem"), foreign.join("ca-cert.pem")).expect("copied");
    for certificates in [&foreign, &nameless, &expired] {
        let error = refusal(&server.address(certificates));
        assert!(error.contains("client-cert.pem"), "{certificates:?}: {error}");
    }
    let error = refusal(&server.plain_address());
    assert!(error.contains("it demands TLS: write nbds://"), "{error}");
    let error = refusal(&server.address(std::path::Path::new("/nonexistent")));
    assert!(error.contains("/nonexistent/ca-cert.pem cannot be used"), "{error}");
}

#[test]
fn a_server_without_tls_is_never_used_by_an_address_that_wants_it() {
    let authority = Authority::new();
    let certificates = authority.make("ours", &["127.0.0.1"], false);
    let server = TestServer::start(Announced { is_chunked: false, ..Announced::default() });
    let refused = Client::connect(&[secured_address(&server, &certificates)], PATIENT);
    let error = refused.expect_err("refused").to_string();
    assert!(error.contains("it offers no TLS: start it with that"), "{error}");
    assert_eq!(server.control.requests(), 0);
}

#[test]
fn errors_of_a_server_are_those_of_their_requests_alone() {
    let dir = tempfile::tempdir().expect("a directory");
    let options = ["--filter=error"];
    let plugin = ["memory", "16M", "error-pwrite=ENOSPC", "error-pwrite-rate=100%"];
    let Some(server) = nbdkit(dir.path(), &options, &plugin) else { return };
    let client = client(std::slice::from_ref(&server.address), PATIENT);
    let mut queue = client.open_queue(4).expect("a queue");
    let mut page = Page::of(1, PAGE);
    assert_eq!(run(&mut queue, false, 0, &mut page), Ending::Failed(libc::ENOSPC));
    assert_eq!(run(&mut queue, true, 0, &mut page), Ending::Done);
    assert_eq!(client.stats()[0].errors, 1);
}

#[test]
fn a_server_that_breaks_the_protocol_ends_requests_and_is_asked_again() {
    for plan in [Plan::WrongCookie, Plan::WrongLength, Plan::Garbage, Plan::Hang, Plan::DoAndHang] {
        for is_chunked in [true, false] {
            if plan == Plan::WrongLength && !is_chunked {
                continue; // A reply without chunks has no length.
            }
            let server = TestServer::start(Announced { is_chunked, ..Announced::default() });
            let client = client(std::slice::from_ref(&server.address), PATIENT);
            let mut queue = client.open_queue(4).expect("a queue");
            let mut page = Page::of(3, PAGE);
            assert_eq!(run(&mut queue, false, 0, &mut page), Ending::Done);
            server
                .control
                .plan(move |asked| if asked.command == READ { plan } else { Plan::Answer });
            assert!(matches!(run(&mut queue, true, 0, &mut page), Ending::Failed(_)), "{plan:?}");
            server.control.behave();
            let mut page = Page::of(0, PAGE);
            until_done(&mut queue, true, 0, &mut page);
            assert!(page.0.iter().all(|byte| *byte == 3), "{plan:?}");
            assert!(client.stats()[0].breaks >= 1);
        }
    }
}

#[test]
fn a_place_that_a_late_write_may_reach_is_not_written_again() {
    let server = TestServer::start(Announced::default());
    let client = client(std::slice::from_ref(&server.address), QUICK);
    let mut queue = client.open_queue(4).expect("a queue");
    server.control.plan(|asked| if asked.command == WRITE { Plan::Hold } else { Plan::Answer });
    let mut old = Page::of(1, PAGE);
    assert_eq!(run(&mut queue, false, 0, &mut old), Ending::Late, "silent for too long");
    server.control.behave();
    let mut new = Page::of(2, PAGE);
    until_done(&mut queue, false, 8192, &mut new);
    // Nobody can use the old place, by whichever queue and as part of whichever range.
    assert_eq!(run(&mut queue, false, 0, &mut new), Ending::Barred);
    let mut other = client.open_queue(1).expect("a queue");
    let mut long = Page::of(4, 2 * PAGE);
    assert_eq!(run(&mut other, false, 0, &mut long), Ending::Barred);
    assert_eq!(server.control.carry_out_held(), 1);
    let mut found = Page::of(9, PAGE);
    until_done(&mut queue, true, 8192, &mut found);
    assert!(found.0.iter().all(|byte| *byte == 2));
    assert_eq!(client.stats()[0].barred, PAGE as u64);
}

#[test]
fn a_request_that_is_never_answered_is_given_up_although_others_are() {
    let server = TestServer::start(Announced::default());
    let times = NbdTimes { stall: Duration::from_millis(500), ..QUICK };
    let client = client(std::slice::from_ref(&server.address), times);
    let mut queue = client.open_queue(4).expect("a queue");
    server.control.plan(|asked| if asked.command == WRITE { Plan::Hold } else { Plan::Answer });
    let mut page = Page::of(1, PAGE);
    push(&mut queue, 1, false, 0, &mut page);
    let (start, mut end, mut read) = (Instant::now(), None, Page::of(0, PAGE));
    while end.is_none() {
        assert!(start.elapsed() < PATIENCE, "it hangs");
        if queue.in_flight() < 2 {
            push(&mut queue, 2, true, 8192, &mut read);
        }
        let mut is_read = false;
        while !is_read && end.is_none() {
            let mut done = |ended: NbdEnd| match ended.token {
                1 => end = Some(ended.ending),
                _ => is_read = true,
            };
            queue.wait(Duration::from_millis(50), &mut done).expect("a wait");
        }
    }
    assert_eq!(end, Some(Ending::Late));
    drop(queue);
}

#[test]
fn a_thread_that_has_not_listened_gives_no_connection_up() {
    let server = TestServer::start(Announced::default());
    let times = NbdTimes { stall: Duration::from_millis(100), ..QUICK };
    let client = client(std::slice::from_ref(&server.address), times);
    let mut page = Page::of(0, PAGE);
    let mut queue = client.open_queue(1).expect("a queue");
    server.control.plan(|asked| if asked.offset > 0 { Plan::Await } else { Plan::Answer });
    push(&mut queue, 1, true, 8192, &mut page);
    queue.submit();
    // As a process does that is stopped, or whose machine is; too old for the server as well, by the clock.
    std::thread::sleep(times.stall * 6);
    queue.wait(Duration::ZERO, &mut |end| panic!("{end:?}")).expect("a wait");
    assert_eq!(client.stats()[0].breaks, 0);
    server.control.let_go();
}

#[test]
fn a_late_trim_bars_its_place() {
    let server = TestServer::start(Announced::default());
    let client = client(std::slice::from_ref(&server.address), QUICK);
    let mut queue = client.open_queue(1).expect("a queue");
    client.write_to(0, 0, &mut [1; PAGE]).expect("connected");
    server.control.plan(|asked| if asked.command == 4 { Plan::Hang } else { Plan::Answer });
    client.trim(0, 8192).expect("nobody needs the bytes");
    server.control.behave();
    let mut page = Page::of(2, PAGE);
    assert_eq!(run(&mut queue, false, 4096, &mut page), Ending::Barred);
    assert_eq!(run(&mut queue, false, 8192, &mut page), Ending::Done);
}

#[test]
fn a_write_that_no_server_got_leaves_its_place_free() {
    let server = TestServer::start(Announced::default());
    let client = client(std::slice::from_ref(&server.address), PATIENT);
    let mut queue = client.open_queue(4).expect("a queue");
    server.control.kill(true);
    let mut page = Page::of(1, PAGE);
    // The first request finds out that the connection is gone.
    assert!(matches!(run(&mut queue, true, 0, &mut page), Ending::Failed(_)));
    assert_eq!(run(&mut queue, false, 0, &mut page), Ending::Failed(libc::ENOTCONN));
    assert_eq!(client.stats()[0].connections, 0);
    server.control.revive();
    until_done(&mut queue, false, 0, &mut page);
    let stats = client.stats()[0];
    assert_eq!((stats.barred, stats.in_flight, stats.connections), (0, 0, 1), "{stats:?}");
    assert!(
        client.stats_of(1).is_none()
            && stats.iter().any(|(name, value)| name == "connections" && value == 1)
    );
}

#[test]
fn a_stopped_server_is_given_up_and_used_again_when_it_goes_on() {
    let server = TestServer::start(Announced::default());
    let times = NbdTimes { connect: Duration::from_millis(200), ..QUICK };
    let client = client(std::slice::from_ref(&server.address), PATIENT);
    drop(client);
    let client = common::client(std::slice::from_ref(&server.address), times);
    let mut queue = client.open_queue(4).expect("a queue");
    let mut page = Page::of(5, PAGE);
    assert_eq!(run(&mut queue, false, 0, &mut page), Ending::Done);
    server.control.pause(true);
    assert!(matches!(run(&mut queue, true, 0, &mut page), Ending::Failed(_)));
    let start = Instant::now();
    while client.stats()[0].state != ServerState::Lost {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
    server.control.pause(false);
    let mut page = Page::of(0, PAGE);
    until_done(&mut queue, true, 0, &mut page);
    assert!(page.0.iter().all(|byte| *byte == 5));
}

#[test]
fn an_export_that_is_another_clients_by_now_is_not_used_any_more() {
    let server = TestServer::start(Announced::default());
    let client = client(std::slice::from_ref(&server.address), PATIENT);
    let mut mark = [1; farheap_nbd::MARK_LEN];
    client.write_to(0, 0, &mut mark).expect("written");
    client.set_mark(&mark);
    let mut queue = client.open_queue(4).expect("a queue");
    let mut page = Page::of(5, PAGE);
    assert_eq!(run(&mut queue, false, 8192, &mut page), Ending::Done);
    let mut memory = server.control.memory();
    memory[..PAGE].fill(2);
    server.control.set_memory(memory);
    let start = Instant::now();
    while client.stats()[0].state != ServerState::Taken {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
    let before = server.control.requests();
    assert_eq!(run(&mut queue, false, 8192, &mut page), Ending::Failed(libc::ENOTCONN));
    assert!(client.open_queue(4).is_err());
    assert!(server.control.requests() <= before + 1, "but for the mark nothing is asked for");
}

#[test]
fn servers_that_lack_something_are_refused_with_it() {
    let refused = |announced| {
        let server = TestServer::start(announced);
        Client::connect(std::slice::from_ref(&server.address), PATIENT)
            .expect_err("refused")
            .to_string()
    };
    let read_only = Announced { is_read_only: true, ..Announced::default() };
    assert!(refused(read_only).contains("is read-only"));
    let alone = Announced { has_multi_conn: false, ..Announced::default() };
    assert!(refused(alone).contains("MULTI_CONN"));
    let nobody: ServerAddress = "nbd://127.0.0.1:1/x".parse().expect("an address");
    let error = Client::connect(std::slice::from_ref(&nobody), PATIENT)
        .expect_err("nobody listens")
        .to_string();
    assert!(error.contains("nbd://127.0.0.1:1/x"), "{error}");
}

#[test]
fn an_endless_handshake_ends_with_the_time_for_it() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its address").port();
    let talker = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").expect("sent");
        // One byte at a time, for ever.
        while stream.write_all(&[0]).is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let address: ServerAddress = format!("nbd://127.0.0.1:{port}/").parse().expect("an address");
    let times = NbdTimes { connect: Duration::from_millis(300), ..PATIENT };
    assert!(Client::connect(std::slice::from_ref(&address), times).is_err());
    talker.join().expect("the client has gone");
}

#[test]
fn reads_by_threads_that_wait_themselves_are_those_of_queues() {
    let server = TestServer::start(Announced::default());
    let client = client(std::slice::from_ref(&server.address), PATIENT);
    client.write_to(0, 4096, &mut [9; PAGE]).expect("written");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let mut into = [0; PAGE];
                    let start = Instant::now();
                    // SAFETY: the buffer is this thread's, of that length.
                    while unsafe { client.read_now(4096, into.as_mut_ptr(), PAGE) }.is_err() {
                        assert!(start.elapsed() < PATIENCE, "never connected");
                        std::thread::yield_now();
                    }
                    assert!(into.iter().all(|byte| *byte == 9));
                }
            });
        }
    });
}

#[test]
fn a_queue_that_is_dropped_bars_what_is_under_way() {
    let server = TestServer::start(Announced::default());
    let client = client(std::slice::from_ref(&server.address), QUICK);
    let mut queue = client.open_queue(4).expect("a queue");
    server.control.plan(|asked| if asked.command == WRITE { Plan::Hold } else { Plan::Answer });
    let mut page = Page::of(1, PAGE);
    push(&mut queue, 1, false, 0, &mut page);
    queue.submit();
    assert_eq!(client.stats()[0].in_flight, 1);
    drop(queue);
    assert_eq!((client.stats()[0].in_flight, client.stats()[0].barred), (0, PAGE as u64));
}
