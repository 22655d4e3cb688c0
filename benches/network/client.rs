//! The client, with its queue.
#![expect(unsafe_code, reason = "pushes buffers of its own")]

use crate::bare::number_of;
use crate::common::{self, Dice, PATIENT};
use crate::servers::Server;
use crate::{LEN, PAGE, PLACES};
use farheap_nbd::{Client, Ending, NbdBuffer, NbdEnd, NbdQueue};
use std::time::{Duration, Instant};

pub(crate) struct Ours {
    _client: Client,
    queue: NbdQueue,
}

impl Ours {
    /// With as many copies as there are servers.
    pub(crate) fn connect(servers: &[&Server]) -> Ours {
        let addresses: Vec<_> = servers.iter().map(|server| server.address.clone()).collect();
        Ours::of(common::client(&addresses, PATIENT))
    }

    pub(crate) fn of(client: Client) -> Ours {
        let queue = client.open_queue(64).expect("a queue");
        Ours { _client: client, queue }
    }

    fn push(&mut self, is_read: bool, token: u64, place: u64, page: &mut [u8]) {
        if !is_read {
            page[..8].copy_from_slice(&number_of(place));
        }
        let buffer = NbdBuffer { ptr: page.as_mut_ptr(), len: page.len() };
        // SAFETY: pages live until all requests have ended; places of writes in flight are never the same.
        let pushed =
            unsafe { self.queue.push(token, is_read, place * LEN as u64, std::iter::once(buffer)) };
        assert!(pushed);
    }

    /// Waits for the only request in flight.
    fn wait(&mut self) {
        let mut is_done = false;
        while !is_done {
            let mut done = |end: NbdEnd| {
                // One that failed would be waited for, for ever.
                assert_eq!(end.ending, Ending::Done);
                is_done = true;
            };
            self.queue.wait(Duration::from_secs(1), &mut done).expect("a wait");
        }
    }

    /// Gives all places their numbers.
    pub(crate) fn fill(&mut self) {
        let mut page = vec![0; LEN];
        for place in 0..PLACES {
            self.push(false, 0, place, &mut page);
            self.wait();
        }
    }

    /// Microseconds within which 99 of a hundred reads of a page end, one at a time, of one of these clients each.
    pub(crate) fn p99(all: &mut [Ours], count: u64) -> f64 {
        let mut dice = Dice(count);
        let mut page = vec![0; PAGE];
        let mut times = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let (place, at) = (dice.below(PLACES), dice.below(all.len() as u64));
            let ours = &mut all[at as usize];
            let start = Instant::now();
            ours.push(true, 0, place, &mut page);
            ours.wait();
            times.push(start.elapsed());
            assert_eq!(page[..8], number_of(place));
        }
        times.sort_unstable();
        times[times.len() * 99 / 100].as_secs_f64() * 1e6
    }

    /// Requests a second.
    pub(crate) fn run(&mut self, is_read: bool, depth: usize, count: u64) -> f64 {
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
