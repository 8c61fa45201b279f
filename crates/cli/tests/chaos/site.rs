//! Site: the database of a scenario, and how faults are inflicted on it.

use std::thread::sleep;
use std::time::{Duration, Instant};

use steadfast_pgtest::{Cluster, Cut, Mode, Proxy, ROLE};

use crate::common::STUCK;
use crate::faults::{Fault, Session, eat_slots};
use crate::nodes::Nodes;

/// Few slots, so that they can be eaten.
const SETTINGS: &[(&str, &str)] = &[("max_connections", "60")];

/// A primary with or without a synchronous standby, and a proxy before whichever is the primary.
pub struct Site {
    pub primary: Cluster,
    pub standby: Option<Cluster>,
    pub proxy: Proxy,
    pub inflicted: Inflicted,
}

/// What was done so far.
#[derive(Debug, Default)]
pub struct Inflicted {
    pub kills: usize,
    pub restarts: usize,
    pub terminated: usize,
    pub failovers: usize,
}

impl Site {
    pub fn make() -> Self {
        let primary = Cluster::start(SETTINGS);
        let proxy = Proxy::start(primary.port());
        Self { primary, standby: None, proxy, inflicted: Inflicted::default() }
    }

    pub fn with_standby() -> Self {
        let mut site = Self::make();
        site.standby = Some(site.primary.standby(true));
        site
    }

    /// The URL of whichever is the primary now, past every proxy.
    pub fn url(&self) -> String {
        self.primary.url("")
    }

    /// A URL with both hosts, the present primary first.
    pub fn url_of_both(&self) -> String {
        let standby = self.standby.as_ref().expect("this site has a standby");
        format!("postgres://{ROLE}@127.0.0.1:{},127.0.0.1:{}/postgres", self.primary.port(), standby.port())
    }

    /// Does it and undoes it: the database accepts connections again when this returns.
    pub fn inflict(&mut self, fault: Fault, nodes: &Nodes) {
        let millis = Duration::from_millis;
        match fault {
            Fault::KillNode { node, down_ms } => {
                nodes.kill(node);
                self.inflicted.kills += 1;
                sleep(millis(down_ms));
                nodes.start_again(node);
            }
            Fault::Restart => {
                self.primary.stop(Mode::Immediate);
                self.primary.start_again();
                self.inflicted.restarts += 1;
            }
            Fault::KillServer { down_ms } => {
                self.primary.kill();
                sleep(millis(down_ms));
                self.primary.start_again();
                self.inflicted.restarts += 1;
            }
            Fault::Terminate { times } => {
                for _ in 0..times {
                    self.inflicted.terminated += self.primary.terminate_backends();
                    sleep(millis(250));
                }
                self.settle_standby();
            }
            Fault::CutBefore { cuts } => self.cut(Cut::Before, cuts),
            Fault::CutAfter { cuts } => self.cut(Cut::After, cuts),
            Fault::Stall { ms } => {
                self.proxy.stall(true);
                sleep(millis(ms));
                self.proxy.stall(false);
            }
            Fault::Freeze { ms } => {
                self.primary.pause();
                sleep(millis(ms));
                self.primary.resume();
            }
            Fault::Lock { ms } => self.lock(millis(ms)),
            Fault::ReadOnly { ms } => {
                self.primary.sql("alter system set default_transaction_read_only = on; select pg_reload_conf()");
                sleep(millis(ms));
                self.primary.sql("alter system reset default_transaction_read_only; select pg_reload_conf()");
            }
            Fault::Exhaust { ms } => self.exhaust(millis(ms)),
            Fault::Failover => self.fail_over(),
        }
    }

    /// Cuts so many connections at their COMMIT.
    fn cut(&self, cut: Cut, count: usize) {
        let (before, begin) = (self.proxy.cuts(), Instant::now());
        self.proxy.cut_commits(cut, count);
        while self.proxy.cuts() < before + count && begin.elapsed() < STUCK {
            sleep(Duration::from_millis(5));
        }
        self.proxy.cut_commits(cut, 0);
    }

    /// Holds the rows of all workflows that have not ended.
    fn lock(&self, time: Duration) {
        let begin = Instant::now();
        let holder = loop {
            let mut session = Session::open(self.primary.port()).expect("there is a slot");
            let statements =
                "begin; select from steadfast.heads where status not in ('completed', 'failed', 'cancelled')
                 for update";
            match session.run(statements) {
                Ok(()) => break session,
                // In each other's way: the next one may be luckier.
                Err(error) => assert!(begin.elapsed() < STUCK, "rows cannot be locked: {error}"),
            }
        };
        sleep(time);
        drop(holder);
    }

    /// Takes every slot, those of the nodes included.
    fn exhaust(&self, time: Duration) {
        let begin = Instant::now();
        let mut eaten = eat_slots(self.primary.port());
        while begin.elapsed() < time {
            let ours = eaten.first_mut().expect("there was a slot");
            ours.run("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'steadfast'")
                .expect("an administrator may end connections");
            eaten.extend(eat_slots(self.primary.port()));
            sleep(Duration::from_millis(50));
        }
    }

    /// Kills the primary and lets its standby take over, which gets a standby of its own.
    fn fail_over(&mut self) {
        self.primary.kill();
        self.take_over();
    }

    fn take_over(&mut self) {
        let standby = self.standby.take().expect("this site has a standby");
        standby.promote();
        self.proxy.retarget(standby.port());
        self.primary = standby;
        self.standby = Some(self.primary.standby(true));
        self.inflicted.failovers += 1;
    }

    /// Stops the standby's time, cuts every connection while commits wait for it, and lets it take over without what it
    /// has not read.
    pub fn fail_over_to_one_that_lags(&mut self) {
        let standby = self.standby.as_ref().expect("this site has a standby");
        standby.pause();
        for _ in 0..4 {
            sleep(Duration::from_millis(400));
            self.proxy.sever();
        }
        self.primary.kill();
        // What has reached its machine is lost with its memory.
        standby.kill();
        standby.start_again();
        self.take_over();
    }

    /// Kills the primary and lets its standby take over, for clients that know both.
    pub fn fail_over_for_good(&mut self) {
        let standby = self.standby.take().expect("this site has a standby");
        self.primary.kill();
        standby.promote();
        self.primary = standby;
        self.inflicted.failovers += 1;
    }

    /// Waits until a standby that lost its connection too follows again.
    fn settle_standby(&self) {
        let begin = Instant::now();
        while self.standby.is_some()
            && self.primary.sql("select count(*) from pg_stat_replication where sync_state = 'sync'") != "1"
        {
            assert!(begin.elapsed() < STUCK, "the standby does not come back");
            sleep(Duration::from_millis(20));
        }
    }
}
