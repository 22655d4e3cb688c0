//! A client as short as it can be.

use crate::common::Dice;
use crate::servers::Server;
use crate::{Failure, LEN, PLACES, Result};
use farheap_nbd::shake_hands;
use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// One connection, and requests of one length.
pub(crate) struct Bare {
    stream: UnixStream,
    replies: BufReader<UnixStream>,
    len: usize,
}

/// The first bytes of the page at a place.
pub(crate) fn number_of(place: u64) -> [u8; 8] {
    place.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_ne_bytes()
}

impl Bare {
    pub(crate) fn connect(server: &Server, len: usize) -> Result<Bare> {
        let mut stream = UnixStream::connect(server.socket()).map_err(Failure::io)?;
        shake_hands(&mut stream, server.export())
            .map_err(|error| Failure::Broken(error.to_string()))?;
        let copy = stream.try_clone().map_err(Failure::io)?;
        let mut bare = Bare { stream, replies: BufReader::with_capacity(256 << 10, copy), len };
        let mut message = vec![0; 28 + len];
        let mut page = vec![0; len];
        for place in 0..PLACES {
            bare.send(false, 0, place, &mut message)?;
            bare.take(&[place], &mut page)?;
        }
        Ok(bare)
    }

    fn send(&mut self, is_read: bool, cookie: u64, place: u64, message: &mut [u8]) -> Result<()> {
        message[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
        message[4..8].copy_from_slice(&[0, 0, 0, u8::from(!is_read)]);
        message[8..16].copy_from_slice(&cookie.to_be_bytes());
        message[16..24].copy_from_slice(&(place * LEN as u64).to_be_bytes());
        message[24..28].copy_from_slice(&(self.len as u32).to_be_bytes());
        message[28..36].copy_from_slice(&number_of(place));
        let len = if is_read { 28 } else { 28 + self.len };
        self.stream.write_all(&message[..len]).map_err(Failure::io)
    }

    /// Takes a reply, and returns its cookie; what was read at one of these places must be right.
    fn take(&mut self, places: &[u64], page: &mut [u8]) -> Result<u64> {
        let mut magic = [0; 4];
        self.replies.read_exact(&mut magic).map_err(Failure::io)?;
        if magic == 0x6744_6698_u32.to_be_bytes() {
            let mut rest = [0; 12];
            self.replies.read_exact(&mut rest).map_err(Failure::io)?;
            assert_eq!(rest[..4], [0; 4], "refused");
            return Ok(rest[11].into());
        }
        loop {
            // Flags, kind, cookie, length.
            let mut rest = [0; 16];
            self.replies.read_exact(&mut rest).map_err(Failure::io)?;
            if rest[3] == 1 {
                self.replies.read_exact(&mut [0; 8]).map_err(Failure::io)?;
                self.replies.read_exact(page).map_err(Failure::io)?;
                assert_eq!(page[..8], number_of(places[usize::from(rest[11])]));
            }
            assert!(rest[3] < 2, "neither data nor an end");
            if rest[1] == 1 {
                return Ok(rest[11].into());
            }
            self.replies.read_exact(&mut magic).map_err(Failure::io)?;
        }
    }

    /// Requests a second.
    pub(crate) fn run(&mut self, is_read: bool, depth: usize, count: u64) -> Result<f64> {
        let mut dice = Dice(count);
        let mut message = vec![0; 28 + self.len];
        let mut page = vec![0; self.len];
        let mut places = vec![0; depth];
        let (start, mut sent, mut done) = (Instant::now(), 0, 0);
        for (cookie, place) in (0..).zip(&mut places) {
            *place = dice.below(PLACES);
            self.send(is_read, cookie, *place, &mut message)?;
            sent += 1;
        }
        while done < count {
            let cookie = self.take(&places, &mut page)?;
            done += 1;
            if sent < count {
                let place = dice.below(PLACES);
                places[cookie as usize] = place;
                self.send(is_read, cookie, place, &mut message)?;
                sent += 1;
            }
        }
        Ok(count as f64 / start.elapsed().as_secs_f64())
    }

    /// Microseconds within which half of the reads end, one at a time.
    pub(crate) fn p50(&mut self, count: u64) -> Result<f64> {
        let mut dice = Dice(count);
        let mut message = vec![0; 28 + self.len];
        let mut page = vec![0; self.len];
        let read = |_| -> Result<Duration> {
            let place = dice.below(PLACES);
            let start = Instant::now();
            self.send(true, 0, place, &mut message)?;
            self.take(&[place], &mut page)?;
            Ok(start.elapsed())
        };
        let mut times = (0..count).map(read).collect::<Result<Vec<_>>>()?;
        times.sort_unstable();
        Ok(times[times.len() / 2].as_secs_f64() * 1e6)
    }
}
