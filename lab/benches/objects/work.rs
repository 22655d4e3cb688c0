//! The program: a table of small objects that is read and updated, as a cache or an interpreter has it.

use crate::numbers::{fold, mix};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Zipf};
use std::hint::black_box;

/// Bytes of an object.
const SIZE_MIN: u64 = 16;
const SIZE_MAX: u64 = 512;
/// Bytes of an object on average, and those of its place in the table.
pub(crate) const OBJECT_BYTES: usize = (SIZE_MIN + SIZE_MAX) as usize / 2 + size_of::<Box<[u8]>>();

/// How often an object is asked for, by its rank.
const EXPONENT: f64 = 0.99;
/// Of this number of operations two are updates: one writes in place, one has a new object for the old one.
const UPDATE_EVERY: u64 = 20;
/// Of this number of operations one reads a record.
const RECORD_EVERY: u64 = 100;
/// Copies of what was read that live at a time.
const REPLIES: usize = 64;
/// A prime, so that objects that are asked for often are strewn over the table.
const STRIDE: u64 = 2_654_435_761;

/// What the table consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mix {
    /// Objects, all of which are asked for by rank.
    Alike,
    /// Next to each object a record, written once and rarely read: code of its own allocates it.
    Records,
}

impl Mix {
    pub(crate) const ALL: [Mix; 2] = [Mix::Alike, Mix::Records];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Mix::Alike => "objects",
            Mix::Records => "objects and records",
        }
    }
}

fn size_of_content(content: u64) -> usize {
    (SIZE_MIN + mix(content) % (SIZE_MAX - SIZE_MIN + 1)) as usize
}

fn write(block: &mut [u8], content: u64) {
    for (word, at) in block.chunks_mut(8).zip(0_u64..) {
        word.copy_from_slice(&mix(content ^ (at << 48)).to_le_bytes()[..word.len()]);
    }
}

fn sum(block: &[u8]) -> u64 {
    let word = |bytes: &[u8]| bytes.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
    block.chunks(8).fold(block.len() as u64, |sum, bytes| fold(sum, word(bytes)))
}

// Not inlined: allocation sites are told apart by their callers' addresses.
#[inline(never)]
fn new_object(content: u64) -> Box<[u8]> {
    let mut block = vec![0; size_of_content(content)].into_boxed_slice();
    write(&mut block, content);
    black_box(block)
}

#[inline(never)]
fn new_record(content: u64) -> Box<[u8]> {
    let mut block = vec![1; size_of_content(content)].into_boxed_slice();
    write(&mut block, content);
    black_box(block)
}

/// The table, and what is asked of it.
pub(crate) struct Program {
    objects: Vec<Box<[u8]>>,
    records: Vec<Box<[u8]>>,
    /// Short-lived objects.
    replies: Vec<Box<[u8]>>,
    zipf: Zipf<f64>,
    random: StdRng,
    done: u64,
    /// What the program has seen.
    pub(crate) answer: u64,
}

impl Program {
    /// Allocates a table of about this number of bytes.
    pub(crate) fn load(kind: Mix, bytes: usize) -> Program {
        let all = bytes / OBJECT_BYTES;
        let (count, records) = match kind {
            Mix::Alike => (all, 0),
            Mix::Records => (all / 2, all / 2),
        };
        let mut program = Program {
            objects: Vec::with_capacity(count),
            records: Vec::with_capacity(records),
            replies: vec![Box::default(); REPLIES],
            zipf: Zipf::new(count as f64, EXPONENT).expect("a positive exponent"),
            random: StdRng::seed_from_u64(1),
            done: 0,
            answer: 0,
        };
        for content in 0..count as u64 {
            program.objects.push(new_object(content));
            if records > 0 {
                program.records.push(new_record(!content));
            }
            program.reply(content as usize);
        }
        program
    }

    /// Reads an object and keeps a copy for a while.
    fn reply(&mut self, at: usize) {
        let object = &self.objects[at];
        self.answer = fold(self.answer, sum(object));
        self.replies[self.done as usize % REPLIES] = object.clone();
        self.done += 1;
    }

    /// Performs this number of operations.
    pub(crate) fn run(&mut self, operations: u64) {
        let count = self.objects.len() as u64;
        for _ in 0..operations {
            let rank = self.zipf.sample(&mut self.random) as u64 - 1;
            let at = (rank * STRIDE % count) as usize;
            let content = mix(self.done);
            match content % UPDATE_EVERY {
                0 => {
                    let block = &mut self.objects[at];
                    write(block, content);
                    self.done += 1;
                }
                1 => {
                    self.objects[at] = new_object(content);
                    self.done += 1;
                }
                _ => match self.records.len() as u64 {
                    records
                        if records > 0 && (content / UPDATE_EVERY).is_multiple_of(RECORD_EVERY) =>
                    {
                        let record = &self.records[(mix(content) % records) as usize];
                        self.answer = fold(self.answer, sum(record));
                        self.done += 1;
                    }
                    _ => self.reply(at),
                },
            }
        }
    }

    /// Reads everything once.
    pub(crate) fn read_all(&mut self) {
        let blocks = self.objects.iter().chain(&self.records).chain(&self.replies);
        self.answer = blocks.fold(self.answer, |answer, block| fold(answer, sum(block)));
    }
}
