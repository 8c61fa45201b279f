//! A cluster of one test: what it survives, and that nothing survives it.

mod owner;

use std::fs;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use owner::{listens, within};
use steadfast_pgtest::{Bouncer, Cluster, Mode, psql};

const SOON: Duration = Duration::from_secs(30);

fn timeline(cluster: &Cluster) -> String {
    cluster.sql("select substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)")
}

#[test]
fn a_cluster_keeps_its_rows_however_it_ends() {
    let cluster = Cluster::start(&[("work_mem", "7MB")]);
    let port = cluster.port();
    cluster.sql("create table rows (id int)");
    cluster.sql("insert into rows values (1)");
    cluster.stop(Mode::Fast);
    assert!(psql(&cluster.url(""), "select 1").is_err());
    cluster.start_again();
    cluster.sql("insert into rows values (2)");
    cluster.stop(Mode::Immediate);
    cluster.start_again();
    cluster.sql("insert into rows values (3)");
    cluster.kill();
    assert!(psql(&cluster.url(""), "select 1").is_err());
    cluster.start_again();
    assert_eq!(cluster.sql("select string_agg(id::text, ' ' order by id) from rows; show work_mem"), "1 2 3\n7MB");
    assert_eq!(cluster.port(), port);
    assert!(cluster.log().contains("database system was not properly shut down"));

    let folder = cluster.folder().to_owned();
    drop(cluster);
    assert!(!folder.exists() && !listens(&format!("127.0.0.1:{port}")));
}

#[test]
fn a_paused_cluster_answers_after_the_pause() {
    let cluster = Cluster::start(&[]);
    cluster.pause();
    let (sender, receiver) = mpsc::channel();
    let url = cluster.url("");
    let asking = thread::spawn(move || sender.send(psql(&url, "select 1")));
    assert!(receiver.recv_timeout(Duration::from_millis(500)).is_err());
    cluster.resume();
    assert_eq!(receiver.recv_timeout(SOON).unwrap().as_deref(), Ok("1"));
    asking.join().unwrap().unwrap();

    // Paused once more, it ends all the same.
    cluster.pause();
    let (port, folder) = (cluster.port(), cluster.folder().to_owned());
    drop(cluster);
    assert!(!folder.exists() && !listens(&format!("127.0.0.1:{port}")));
}

#[test]
fn clients_are_sent_away() {
    let cluster = Cluster::start(&[]);
    let url = cluster.url("");
    let sleeping = thread::spawn(move || psql(&url, "select pg_sleep(60)"));
    within(SOON, "the client sleeps", || {
        cluster.sql("select count(*) from pg_stat_activity where wait_event = 'PgSleep'") == "1"
    });
    assert_eq!(cluster.terminate_backends(), 1);
    assert!(sleeping.join().unwrap().unwrap_err().contains("terminating connection"));
}

#[test]
fn a_promoted_standby_has_what_was_committed() {
    let primary = Cluster::start(&[]);
    primary.sql("create table rows (id int); insert into rows values (1)");
    let heir = primary.standby(true);
    let follower = primary.standby(false);
    for id in 2..=20 {
        primary.sql(&format!("insert into rows values ({id})"));
    }
    let before = timeline(&primary);
    primary.kill();
    assert_eq!(heir.sql("select pg_is_in_recovery()"), "t");
    heir.promote();
    assert_eq!(heir.sql("select count(*), max(id) from rows"), "20|20");
    assert!(timeline(&heir) > before);
    heir.sql("insert into rows values (21)");
    // Copied when its primary had a synchronous standby, it waits for none itself.
    follower.promote();
    follower.sql("insert into rows values (21)");
}

#[test]
fn a_bouncer_lends_few_connections_to_many_clients() {
    let cluster = Cluster::start(&[]);
    let bouncer = Bouncer::start(cluster.port());
    let url = bouncer.url("application_name=guest");
    thread::scope(|scope| {
        let clients: Vec<_> =
            (0..10).map(|_| scope.spawn(|| psql(&url, "select pg_sleep(0.1); select 'lent'"))).collect();
        for client in clients {
            assert_eq!(client.join().unwrap().as_deref(), Ok("\nlent"));
        }
    });
    let lent: usize =
        cluster.sql("select count(*) from pg_stat_activity where backend_type = 'client backend'").parse().unwrap();
    assert!((2..=6).contains(&lent), "{lent} connections, with the one that asks");

    cluster.kill();
    cluster.start_again();
    within(SOON, "the bouncer finds the server again", || psql(&url, "select 1").is_ok());
    let port = bouncer.port();
    drop(bouncer);
    assert!(!listens(&format!("127.0.0.1:{port}")));
}

#[test]
fn a_keeper_ends_the_cluster_of_a_killed_owner() {
    let owner = owner::start(&["cluster"]);
    let (url, address) = (owner.url.clone(), owner.address().to_owned());
    let data = psql(&url, "show data_directory").unwrap();
    let folder = Path::new(&data).parent().unwrap();
    assert!(fs::exists(folder).unwrap());
    owner.kill();
    within(SOON, "the server ends, and its folder goes", || !listens(&address) && !folder.exists());
}
