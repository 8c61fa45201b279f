//! Faults: what is done to the database from outside, and plans of them.

use std::fmt;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use steadfast_pgtest::ROLE;

use crate::chance::Chance;

/// A bare session with a server: stands where it is until it is dropped, and needs no slot later on.
pub struct Session(TcpStream);

impl Session {
    /// Connects; what the server said when it refused.
    pub fn open(port: u16) -> Result<Self, String> {
        let told = |error: std::io::Error| error.to_string();
        let mut stream = TcpStream::connect(("127.0.0.1", port)).map_err(told)?;
        stream.set_read_timeout(Some(Duration::from_secs(60))).map_err(told)?;
        let mut start = 196_608_u32.to_be_bytes().to_vec();
        for text in ["user", ROLE, "database", "postgres", "application_name", "chaos", ""] {
            start.extend_from_slice(text.as_bytes());
            start.push(0);
        }
        let length = u32::try_from(start.len() + 4).expect("it is short");
        stream.write_all(&[&length.to_be_bytes()[..], &start].concat()).map_err(told)?;
        let mut session = Self(stream);
        session.until_ready()?;
        Ok(session)
    }

    /// Runs statements.
    pub fn run(&mut self, statements: &str) -> Result<(), String> {
        let length = u32::try_from(statements.len() + 5).expect("it is short");
        let message = [b"Q", &length.to_be_bytes()[..], statements.as_bytes(), b"\0"].concat();
        self.0.write_all(&message).map_err(|error| error.to_string())?;
        self.until_ready()
    }

    /// Reads until the server waits for more.
    fn until_ready(&mut self) -> Result<(), String> {
        let (mut head, mut refused) = ([0; 5], None);
        loop {
            if let Err(error) = self.0.read_exact(&mut head) {
                return Err(refused.unwrap_or_else(|| error.to_string()));
            }
            let length = u32::from_be_bytes(head[1..].try_into().expect("four bytes are four"));
            let mut body = vec![0; length as usize - 4];
            self.0.read_exact(&mut body).map_err(|error| error.to_string())?;
            match head[0] {
                b'E' => refused = Some(String::from_utf8_lossy(&body).replace('\0', " ")),
                b'Z' => return refused.map_or(Ok(()), Err),
                _ => {}
            }
        }
    }
}

/// Takes every slot that the server has left.
pub fn eat_slots(port: u16) -> Vec<Session> {
    let mut eaten = Vec::new();
    for _ in 0..1_000 {
        match Session::open(port) {
            Ok(session) => eaten.push(session),
            Err(_) => return eaten,
        }
    }
    panic!("a server has more than 1000 slots");
}

/// One thing that goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL for a node, which is started again after a while.
    KillNode { node: usize, down_ms: u64 },
    /// `pg_ctl stop -m immediate`, and started again.
    Restart,
    /// SIGKILL for every process of the server, and started again.
    KillServer { down_ms: u64 },
    /// Every connection is ended by an administrator, so many times.
    Terminate { times: usize },
    /// The connections of the next COMMITs are cut before those have reached the server.
    CutBefore { cuts: usize },
    /// The same after the server has answered.
    CutAfter { cuts: usize },
    /// Connections stay open and nothing passes.
    Stall { ms: u64 },
    /// The time of the server stands still.
    Freeze { ms: u64 },
    /// Somebody holds the rows of all live workflows.
    Lock { ms: u64 },
    /// The database takes no writes.
    ReadOnly { ms: u64 },
    /// There is no slot for a connection.
    Exhaust { ms: u64 },
    /// The primary is killed and its standby takes over.
    Failover,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KillNode { node, down_ms } => write!(f, "node {node} killed for {down_ms} ms"),
            Self::Restart => f.write_str("immediate restart"),
            Self::KillServer { down_ms } => write!(f, "server killed for {down_ms} ms"),
            Self::Terminate { times } => write!(f, "{times} x backends terminated"),
            Self::CutBefore { cuts } => write!(f, "{cuts} cuts before COMMIT"),
            Self::CutAfter { cuts } => write!(f, "{cuts} cuts after COMMIT"),
            Self::Stall { ms } => write!(f, "stall of {ms} ms"),
            Self::Freeze { ms } => write!(f, "server frozen for {ms} ms"),
            Self::Lock { ms } => write!(f, "rows locked for {ms} ms"),
            Self::ReadOnly { ms } => write!(f, "read-only for {ms} ms"),
            Self::Exhaust { ms } => write!(f, "no slots for {ms} ms"),
            Self::Failover => f.write_str("failover"),
        }
    }
}

/// So many faults, from the seed alone, each after a pause.
pub fn plan(seed: u64, nodes: u64) -> impl Iterator<Item = (Duration, Fault)> {
    let mut chance = Chance::of(seed).apart(1);
    let (mut last, mut previous) = (u64::MAX, u64::MAX);
    std::iter::from_fn(move || {
        let pause = chance.millis(200..1_500);
        // Not the same kind as the two before.
        let kind = loop {
            let kind = chance.below(12);
            if kind != last && kind != previous {
                break kind;
            }
        };
        (previous, last) = (last, kind);
        let mut ms = |from, to| from + chance.below(to - from);
        let fault = match kind {
            0 => {
                Fault::KillNode { node: usize::try_from(ms(0, nodes)).expect("nodes are few"), down_ms: ms(50, 1_500) }
            }
            1 => Fault::Restart,
            2 => Fault::KillServer { down_ms: ms(50, 2_000) },
            3 => Fault::Terminate { times: usize::try_from(ms(1, 6)).expect("small") },
            4 => Fault::CutBefore { cuts: usize::try_from(ms(1, 12)).expect("small") },
            5 => Fault::CutAfter { cuts: usize::try_from(ms(1, 12)).expect("small") },
            6 => Fault::Stall { ms: ms(200, 3_000) },
            7 => Fault::Freeze { ms: ms(200, 3_000) },
            8 => Fault::Lock { ms: ms(200, 4_000) },
            9 => Fault::ReadOnly { ms: ms(200, 3_000) },
            10 => Fault::Exhaust { ms: ms(200, 3_000) },
            _ => Fault::Failover,
        };
        Some((pause, fault))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_the_same_plan_again_and_another_one_another() {
        let of = |seed| plan(seed, 3).take(50).map(|(pause, fault)| format!("{pause:?} {fault}")).collect::<Vec<_>>();
        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
        let kinds = plan(7, 3).take(200).map(|(_, fault)| std::mem::discriminant(&fault));
        assert_eq!(kinds.collect::<std::collections::HashSet<_>>().len(), 12, "every kind has its turn");
    }
}
