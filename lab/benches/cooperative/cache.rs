//! A host's result cache under the manager's limit.
//!
//! One thread looks up answers, skewed; a miss computes the answer for a millisecond and keeps it
//! if there is memory for it. What is asked back goes in the order of insertion, unless it was
//! looked up since (second chance).

use crate::options::Options;
use crate::random::Random;
use crate::run::Beside;
use farheap::ByteCount;
use farheap::manager::{Account, MemoryManager, Reclaim, ReclaimCost};
use std::collections::{HashMap, VecDeque};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// Bytes of an answer.
const ANSWER: usize = 16 << 10;

/// Share of the limit that all answers would take.
const ALL: f64 = 0.5;

/// Time to compute an answer, and from one look-up to the next.
const COMPUTE: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(100);

/// Where the cache stands among those who are asked for memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Place {
    /// It has this share of the limit, and nobody takes it.
    Fixed(f64),
    First,
    Last,
    FirstWithFloor(f64),
}

/// Look-ups of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Answers {
    pub(crate) looked_up: u64,
    pub(crate) hits: u64,
    pub(crate) seconds: f64,
}

pub(crate) struct ResultCache {
    place: Place,
    limit: ByteCount,
    random: Mutex<Random>,
    used: Arc<AtomicU64>,
    answers: Mutex<Answers>,
}

#[derive(Default)]
struct Kept {
    /// With whether it was looked up since it was passed.
    answers: HashMap<u64, (Box<[u8]>, bool)>,
    order: VecDeque<u64>,
}

/// What the manager asks.
struct Keeper {
    place: Place,
    account: Account,
    used: Arc<AtomicU64>,
    kept: Mutex<Kept>,
}

impl Keeper {
    /// Drops answers of at least `want` bytes in all; returns how many bytes they had.
    fn drop_some(&self, want: u64) -> u64 {
        let mut kept = self.kept.lock().expect("no panic in the cache");
        let (mut freed, mut passes) = (0, 2 * kept.order.len());
        while freed < want && passes > 0 {
            let Some(key) = kept.order.pop_front() else { break };
            passes -= 1;
            let looked_up = &mut kept.answers.get_mut(&key).expect("it is listed").1;
            if std::mem::take(looked_up) {
                kept.order.push_back(key);
                continue;
            }
            drop(kept.answers.remove(&key));
            freed += ANSWER as u64;
        }
        self.account.uncharge(ByteCount(freed));
        self.used.fetch_sub(freed, Ordering::Relaxed);
        freed
    }
}

impl Reclaim for Keeper {
    fn reclaim(&self, want: ByteCount, cost: ReclaimCost) -> ByteCount {
        let gives = match self.place {
            Place::Fixed(_) => false,
            // Computed again at the cost of processor time, without a device.
            Place::First | Place::FirstWithFloor(_) => cost >= ReclaimCost::Reread,
            Place::Last => cost >= ReclaimCost::WriteBack,
        };
        ByteCount(if gives { self.drop_some(want.get()) } else { 0 })
    }

    fn order(&self, _cost: ReclaimCost) -> u32 {
        if self.place == Place::Last { 1_000 } else { 1 }
    }
}

impl ResultCache {
    pub(crate) fn new(options: &Options, place: Place) -> ResultCache {
        ResultCache {
            place,
            limit: options.limit,
            random: Mutex::new(Random::new(options.seed + 99)),
            used: Arc::default(),
            answers: Mutex::default(),
        }
    }

    pub(crate) fn answers(&self) -> Answers {
        *self.answers.lock().expect("no panic in the cache")
    }

    fn share(&self, share: f64) -> ByteCount {
        ByteCount((self.limit.get() as f64 * share) as u64)
    }

    fn look_up(&self, manager: &MemoryManager, keeper: &Keeper, key: u64) -> bool {
        {
            let mut kept = keeper.kept.lock().expect("no panic in the cache");
            if let Some((answer, looked_up)) = kept.answers.get_mut(&key) {
                assert!(answer.iter().all(|byte| *byte == key as u8), "another answer");
                *looked_up = true;
                return true;
            }
        }
        let began = Instant::now();
        while began.elapsed() < COMPUTE {
            black_box(key);
        }
        let bytes = ByteCount(ANSWER as u64);
        // A cache must not push itself out: it takes what is free, or what others give.
        let is_full = keeper.account.used().get() + bytes.get() > keeper.account.ceiling().get();
        if is_full {
            keeper.drop_some(bytes.get());
        }
        if manager.charge(&keeper.account, bytes).is_ok() {
            self.used.fetch_add(bytes.get(), Ordering::Relaxed);
            let answer = vec![key as u8; ANSWER].into_boxed_slice();
            let mut kept = keeper.kept.lock().expect("no panic in the cache");
            kept.answers.insert(key, (answer, false));
            kept.order.push_back(key);
        }
        false
    }
}

impl Beside for ResultCache {
    fn run(&self, manager: &Arc<MemoryManager>, stop: &AtomicBool) -> Result<(), String> {
        let account = manager.join("results").map_err(|error| error.to_string())?;
        let kept = Mutex::new(Kept::default());
        let (place, used) = (self.place, Arc::clone(&self.used));
        let keeper = Arc::new(Keeper { place, account, used, kept });
        let floor = match self.place {
            Place::Fixed(share) | Place::FirstWithFloor(share) => self.share(share),
            Place::First | Place::Last => ByteCount::ZERO,
        };
        keeper.account.set_floor(floor).map_err(|error| error.to_string())?;
        if let Place::Fixed(_) = self.place {
            keeper.account.set_ceiling(floor);
        }
        let weak: Weak<Keeper> = Arc::downgrade(&keeper);
        keeper.account.set_reclaimer(weak);
        let keys = self.share(ALL).get() / ANSWER as u64;
        let mut random = self.random.lock().expect("one run at a time").clone();
        let (mut answers, began) = (Answers::default(), Instant::now());
        while !stop.load(Ordering::Relaxed) {
            // A fifth of the answers is wanted four times in five.
            let hot = random.percent(80);
            let key = if hot { random.below(keys.div_ceil(5)) } else { random.below(keys) };
            answers.hits += u64::from(self.look_up(manager, &keeper, key));
            answers.looked_up += 1;
            // A client that asks at a rate of its own: without the pause the look-ups would take a
            // processor from the transactions, and the two could not be compared.
            std::thread::sleep(PAUSE);
        }
        answers.seconds = began.elapsed().as_secs_f64();
        *self.answers.lock().expect("no panic in the cache") = answers;
        keeper.drop_some(u64::MAX);
        Ok(())
    }

    fn used(&self) -> ByteCount {
        ByteCount(self.used.load(Ordering::Relaxed))
    }
}
