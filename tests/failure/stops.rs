//! A process that is stopped for longer than its deadlines: nothing is lost, nobody gives up.

use crate::common::mem_store;
use crate::harness::{Far, config, in_child, stamp, wait_until};
use crate::servers::{Announced, TestServer, client};
use farheap::ByteCount;
use farheap::manager::MemoryManager;
use farheap::pool::PoolConfig;
use farheap::region::{FaultMode, Install};
use farheap_nbd::NbdTimes;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Of a latch, a charge, a device request.
const DEADLINE: Duration = Duration::from_secs(10);
const PAGES: usize = 96;

/// Has the process stopped for longer than [`DEADLINE`]; returns when it goes on.
fn stop() {
    let pid = std::process::id();
    let script = format!("kill -STOP {pid}; sleep 11; kill -CONT {pid}");
    let status = Command::new("sh").args(["-c", &script]).status();
    assert!(status.expect("there is a shell").success());
}

/// The stop that all cases share.
struct Stop {
    /// Dropped when the case waits for something.
    ready: Sender<()>,
    over: Receiver<()>,
}

impl Stop {
    /// Has the process stopped once all cases are here, or have failed; returns when it goes on.
    fn pass(self) {
        drop(self.ready);
        self.over.recv().expect_err("nothing is sent");
    }
}

#[test]
fn whatever_is_waited_for_is_waited_for_in_time_that_the_process_has() {
    let name = "stops::whatever_is_waited_for_is_waited_for_in_time_that_the_process_has";
    let cases: [fn(Stop); 7] = [
        latch,
        memory,
        |stop| read(stop, FaultMode::default()),
        |stop| read(stop, FaultMode::InThread),
        |stop| room(stop, Install::Auto),
        |stop| room(stop, Install::Copy),
        connection,
    ];
    let body = || {
        std::thread::scope(|scope| {
            let (ready, waited_for) = channel();
            let ends = cases.map(|case| {
                let (end, over) = channel();
                let ready = ready.clone();
                scope.spawn(move || case(Stop { ready, over }));
                end
            });
            drop(ready);
            waited_for.recv().expect_err("nothing is sent");
            stop();
            drop(ends);
        });
    };
    let Some(ended) = in_child(name, body) else { return };
    ended.expect_success();
}

/// A reader waits for a page while the process is stopped; the writer then lets go of it at once.
fn latch(stop: Stop) {
    let manager = MemoryManager::start(ByteCount::mib(16)).expect("a manager");
    let config = PoolConfig::new().deadline(DEADLINE);
    let pool = config.create_on(mem_store(ByteCount::mib(64)), &manager).expect("a pool");
    let page = pool.allocate().expect("a page");
    let id = page.id();
    let waits = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            waits.store(true, Ordering::Release);
            pool.fix_shared(id).map(|_| ())
        });
        wait_until("the reader", || waits.load(Ordering::Acquire));
        // It is about to wait. If it does not yet, the rest is true all the same.
        std::thread::sleep(Duration::from_millis(100));
        stop.pass();
        drop(page);
        reader.join().expect("a result").expect("the page is free");
    });
}

/// A charge waits for memory while the process is stopped; it is given back right after.
fn memory(stop: Stop) {
    let manager = MemoryManager::start(ByteCount::mib(16)).expect("a manager");
    manager.set_deadline(DEADLINE);
    let account = manager.temporary();
    let held = ByteCount::mib(15);
    manager.charge(account, held).expect("it is free");
    let waits = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let charge = scope.spawn(|| {
            waits.store(true, Ordering::Release);
            manager.charge(account, held)
        });
        wait_until("the charge", || waits.load(Ordering::Acquire));
        // It is about to wait. If it does not yet, the rest is true all the same.
        std::thread::sleep(Duration::from_millis(100));
        stop.pass();
        account.uncharge(held);
        charge.join().expect("a result").expect("there is memory");
    });
}

/// A write waits for its connection while the process is stopped; the server answers then.
fn connection(stop: Stop) {
    let server = TestServer::start(Announced::default());
    let times = NbdTimes { connect: DEADLINE, stall: DEADLINE };
    let client = client(std::slice::from_ref(&server.address), times);
    server.control.pause(true);
    std::thread::scope(|scope| {
        let write = scope.spawn(|| client.write_to(0, 0, &mut [1; 4096]));
        // As above.
        std::thread::sleep(Duration::from_millis(100));
        stop.pass();
        server.control.pause(false);
        write.join().expect("a result").expect("the server answers");
    });
}

/// Threads wait for a device that does not answer, while the process is stopped; it answers then.
fn read(stop: Stop, mode: FaultMode) {
    let config = config(Install::Auto).mode(mode).deadline(DEADLINE);
    let Some(far) = Far::new(config, PAGES, 1) else { return };
    far.store(0..PAGES);
    far.control.pause();
    let threads: Vec<_> = (0..8).map(|n| (n, far.touch(n))).collect();
    // As above.
    std::thread::sleep(Duration::from_millis(100));
    stop.pass();
    far.control.release();
    for (page, thread) in threads {
        assert_eq!(thread.join().expect("the page is there"), stamp(page));
    }
    assert_eq!((far.stats().poisoned, far.stats().read_errors), (0, 0));
    far.expect_healthy();
}

/// A thread waits for room that writes would make, while the process is stopped; they end then.
fn room(stop: Stop, install: Install) {
    let config = config(install).deadline(DEADLINE);
    let pages = 3 * (config.limit.0 / 4096) as usize;
    let Some(far) = Far::new(config, pages, 1) else { return };
    far.control.pause();
    std::thread::scope(|scope| {
        scope.spawn(|| far.fill(0..pages));
        wait_until("a thread without room", || far.stats().faults_starved > 0);
        stop.pass();
        far.control.release();
    });
    far.check(0..pages);
    assert_eq!((far.stats().poisoned, far.stats().write_errors), (0, 0), "{install:?}");
}
